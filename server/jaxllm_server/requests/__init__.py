"""Fields of JSON bodies."""
