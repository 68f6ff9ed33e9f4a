"""Anthropic's API. Pure."""
