"""Kernels that compilers of the machine make: in C++ for CPUs, where XLA reads slowly, and FlashInfer's for GPUs."""
