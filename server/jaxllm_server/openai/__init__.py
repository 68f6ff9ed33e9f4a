"""OpenAI's requests and responses as plain data, in both directions. Pure.

Knows JSON's values. Knows no HTTP and no engine.
"""
