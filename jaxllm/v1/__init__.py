"""Stubs of the gRPC API, generated from proto/jaxllm/v1 by `make proto`; nothing here is written by hand."""
