"""Selects the requests and KV blocks of each step, by pure functions over plain data.

Independent of text, device, clock and randomness.
"""
