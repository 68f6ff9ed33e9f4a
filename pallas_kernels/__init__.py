"""Kernels for serving language models: paged attention and the writing of its cache.

Imports jax and numpy, never jaxllm. Every operation takes `implementation`; None picks the best one for the platform
that the program is compiled for, and `resolve` says which one that is.
"""

from pallas_kernels.api import implementations, operations, paged_decode, paged_prefill, resolve, write_kv

__all__ = ["implementations", "operations", "paged_decode", "paged_prefill", "resolve", "write_kv"]
