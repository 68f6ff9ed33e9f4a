"""Ollama's API. Pure."""
