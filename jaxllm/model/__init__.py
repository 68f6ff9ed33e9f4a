"""The decoder: its specification (`spec`), parameters and computation."""
