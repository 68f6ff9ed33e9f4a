"""The decoder: specification, parameters and computation."""
