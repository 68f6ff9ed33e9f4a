"""Chooses devices, types, sizes and memory before anything large is allocated."""
