"""Parity with transformers: how the golden files are made, and the driver that runs our decoder over them."""
