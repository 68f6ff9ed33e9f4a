"""Choices before large allocations."""
