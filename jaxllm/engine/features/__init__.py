"""Features of requests besides plain sampling; see feature.py."""
