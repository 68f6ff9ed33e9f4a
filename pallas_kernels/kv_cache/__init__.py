"""Writing to the paged cache: one module for each implementation."""
