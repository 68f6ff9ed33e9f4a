"""The HTTP server: routes, access checks, and serialization."""
