"""Paged attention: a module per implementation."""
