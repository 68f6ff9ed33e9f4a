"""Embeddings, classification and scores."""
