"""Kernels built by local compilers: C++ for CPUs, and FlashInfer for GPUs."""
