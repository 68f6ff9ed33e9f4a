"""Code that HTTP and gRPC share: options, errors, strict JSON."""
