"""Listening sockets, API keys, and limits per client."""
