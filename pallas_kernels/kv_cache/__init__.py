"""Writes to the paged cache: a module per implementation."""
