"""Benchmarks of `jaxllm bench`."""
