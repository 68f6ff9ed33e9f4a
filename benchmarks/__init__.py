"""Measurements behind the figures in README and DECISIONS; `make bench` runs them. Not collected by pytest."""
