"""Parity with transformers: golden files, and the driver that runs our decoder over them."""
