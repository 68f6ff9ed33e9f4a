"""The loop over scheduler and runner, and the Python API."""
