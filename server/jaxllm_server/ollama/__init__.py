"""Ollama's API: converts requests to calls, chunks to lines of JSON. Pure."""
