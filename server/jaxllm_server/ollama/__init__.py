"""Ollama's API: bodies become calls, chunks become lines of JSON. Pure, as `openai/` is.

Knows no HTTP, no engine and no template.
"""
