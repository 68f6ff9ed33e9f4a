"""Compiles programs, and keeps them between processes."""
