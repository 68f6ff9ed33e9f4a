"""The choice of tokens from logits: one module for each implementation."""
