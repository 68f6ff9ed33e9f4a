"""Choices of devices, types, sizes and memory before large allocations."""
