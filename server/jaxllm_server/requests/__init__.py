"""Fields of JSON request bodies, those common to protocols, and the client's options for the answer."""
