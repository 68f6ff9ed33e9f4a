"""Record all calls of an engine's scheduler, and replay them."""
