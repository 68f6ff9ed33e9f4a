"""Reads a model's config.json: its architecture, fields and stored formats."""
