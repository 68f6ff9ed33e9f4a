"""Reads and writes a model's files: weights, adapters, draft heads, poolers."""
