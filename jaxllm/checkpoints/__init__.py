"""Read and write model files: weights, adapters, draft heads, poolers."""
