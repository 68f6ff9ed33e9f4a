"""Parse config.json."""
