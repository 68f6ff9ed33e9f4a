"""The version, in a module of its own that any room can import."""

__version__ = "0.1.0"
