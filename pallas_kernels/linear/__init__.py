"""Products of a few or many rows with a weight, as it is or quantized."""
