"""Anthropic's API: bodies become calls, chunks become messages and events. Pure, as `openai/` is.

Knows no HTTP, no engine and no template.
"""
