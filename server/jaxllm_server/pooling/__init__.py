"""Pooling (embeddings, classification, scores) for all protocols."""
