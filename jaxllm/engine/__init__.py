"""Requests in, outputs out: the loop over the scheduler and the runner, its thread, and the Python API.

Knows prompts, sampling parameters and outputs. Knows no protocol, and of the device only what the runner returns.
"""
