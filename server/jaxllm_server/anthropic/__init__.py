"""Anthropic's API: requests to calls, chunks to messages and events. Pure."""
