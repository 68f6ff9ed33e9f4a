"""Streaming parsers that split a model's text into reasoning, tool calls and content. Pure."""
