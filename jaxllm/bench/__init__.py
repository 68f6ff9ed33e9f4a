"""What `jaxllm bench` measures with, a module each: what is sent, when, where to, and what is reported.

Importing this package imports nothing else. JAX, an HTTP client and plotting are imported by the modules that need
them, and those by the commands only when they run.
"""
