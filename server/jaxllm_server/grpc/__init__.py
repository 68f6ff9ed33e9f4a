"""The gRPC server: services, access checks, and conversion of messages."""
