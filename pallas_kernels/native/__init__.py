"""Kernels built by local compilers."""
