"""Products of rows with float or quantized weights."""
