"""What of a model's text is reasoning, a tool call or content. Pure.

Knows text as it grows. Knows no protocol.
"""
