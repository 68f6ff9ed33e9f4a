"""Prompts, constraints and outputs of generating calls."""
