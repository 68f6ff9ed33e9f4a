"""Generating calls of any protocol: prompts, constraints, and parsing of outputs."""
