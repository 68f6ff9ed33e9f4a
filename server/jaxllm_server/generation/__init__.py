"""Generating calls of any protocol: prompts, constraints, outputs."""
