"""Sampling from logits: a module per implementation."""
