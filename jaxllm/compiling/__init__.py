"""Compile programs and cache them between processes."""
