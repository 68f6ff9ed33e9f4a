"""KV transfer: an engine computes a prompt, and another continues it."""
