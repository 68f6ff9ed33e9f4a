"""Beam search: requests with `BeamSearchParams`, each a gang of sequences that fork."""
