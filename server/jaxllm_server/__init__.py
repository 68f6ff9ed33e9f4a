"""The front ends of jaxllm: gRPC and OpenAI-compatible HTTP on one asynchronous engine, in one process."""
