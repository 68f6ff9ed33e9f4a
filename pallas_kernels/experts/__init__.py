"""Mixture of experts: selection, and weighted sums of the experts' results."""
