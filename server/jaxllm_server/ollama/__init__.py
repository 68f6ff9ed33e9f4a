"""Ollama's API: bodies to calls, chunks to lines of JSON. Pure."""
