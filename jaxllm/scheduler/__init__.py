"""Selects the requests and KV blocks of each step, by pure functions: no text, device, clock or randomness."""
