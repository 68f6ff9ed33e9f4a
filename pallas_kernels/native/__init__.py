"""Kernels built by local compilers: C++ for CPUs, where XLA reads slowly, and FlashInfer for GPUs."""
