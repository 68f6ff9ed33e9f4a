"""Ollama's API: converts bodies to calls and chunks to lines of JSON. Pure."""
