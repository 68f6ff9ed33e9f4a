"""The gRPC server: services, what guards them, the mapping of messages.

Knows protobuf and gRPC. Knows no engine: it calls `shared.serving`.
"""
