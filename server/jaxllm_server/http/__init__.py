"""The HTTP server: routes, what guards them, how answers and errors are written.

Knows HTTP. Knows no engine: it calls `shared.serving`.
"""
