"""Outputs that obey a schema, an expression or a grammar: constraints compiled, and followed token by token."""
