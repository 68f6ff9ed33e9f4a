"""Structured outputs: compile schemas, regular expressions and grammars, and constrain outputs token by token."""
