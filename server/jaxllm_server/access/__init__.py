"""Listening sockets, API keys, limits per client."""
