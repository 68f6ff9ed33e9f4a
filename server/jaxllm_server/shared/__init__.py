"""Code that HTTP and gRPC share."""
