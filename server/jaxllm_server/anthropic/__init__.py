"""Anthropic's API: converts requests to calls, chunks to messages and events. Pure."""
