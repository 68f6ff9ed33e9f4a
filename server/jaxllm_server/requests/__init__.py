"""Fields of JSON request bodies, and the client's options for the answer."""
