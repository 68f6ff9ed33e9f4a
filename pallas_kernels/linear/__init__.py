"""Products with float or quantized weights."""
