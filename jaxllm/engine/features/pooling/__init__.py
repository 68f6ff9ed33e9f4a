"""Prompts converted to vectors by models that embed, classify or score."""
