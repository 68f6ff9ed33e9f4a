"""Sampling in compiled code, on one device or several."""
