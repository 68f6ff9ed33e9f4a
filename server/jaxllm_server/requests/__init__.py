"""Fields of JSON bodies, and the client's options for the answer."""
