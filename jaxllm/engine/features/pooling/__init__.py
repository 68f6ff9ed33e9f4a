"""Pooling: prompts that become a vector, by models that embed, classify or score."""
