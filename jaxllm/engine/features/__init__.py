"""Features of requests besides plain sampling; feature.py has their protocol."""
