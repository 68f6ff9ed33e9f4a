"""Hostile input from clients and in model folders, and the required reaction to it.

`targets.py` lists every entry point as a function of bytes. Hypothesis and seeded mutations drive them in the default
tests; `make fuzz` drives the same functions with atheris, guided by coverage (`__main__.py`).
"""

import os

FEW = int(os.environ.get("FUZZ_FEW", "100"))  # examples in the default tests
MANY = int(os.environ.get("FUZZ_EXAMPLES", "1000"))  # in test-slow; `make fuzz` uses ten thousand
