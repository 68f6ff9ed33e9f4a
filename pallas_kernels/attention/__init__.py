"""Paged attention: one module for each implementation."""
