"""Writes to the paged cache."""
