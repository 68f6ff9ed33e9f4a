"""Requests in, outputs out: the loop over scheduler and runner, and the Python API."""
