"""Structured outputs: constrain outputs token by token."""
