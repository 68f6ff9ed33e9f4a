"""Features of requests besides plain sampling, a module or a folder each. feature.py has their protocol."""
