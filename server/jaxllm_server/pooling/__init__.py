"""A pooling call on any protocol."""
