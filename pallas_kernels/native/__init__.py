"""Kernels in C++ for CPUs, built on the machine that runs them, because XLA's own leave much of its memory's speed."""
