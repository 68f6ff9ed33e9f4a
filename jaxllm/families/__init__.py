"""Parse config.json: architecture, fields and quantization formats."""
