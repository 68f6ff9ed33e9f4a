"""Selects the requests and KV blocks of each step by pure functions."""
