"""JSON bodies of requests: their fields, those that protocols share, and how a client wants to be answered."""
