"""The version, importable from any room."""

__version__ = "0.1.0"
