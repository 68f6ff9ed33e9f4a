"""Mixtures of experts: which ones each token chooses, and what these give, weighed and summed."""
