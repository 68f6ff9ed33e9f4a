"""Streaming parsers that split text into reasoning, tool calls and content. Pure."""
