"""jaxllm's front ends: gRPC and OpenAI-compatible HTTP on one asynchronous engine."""
