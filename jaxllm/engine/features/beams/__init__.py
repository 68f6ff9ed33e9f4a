"""Beam search: requests with `BeamSearchParams`."""
