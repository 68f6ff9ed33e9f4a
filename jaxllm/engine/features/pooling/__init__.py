"""Prompts converted to vectors."""
