"""The package's version; imports nothing, so that any room can import it."""

__version__ = "0.1.0"
