"""Hostile input: what strangers may send or leave in a model's folder, and what must become of it.

`targets.py` names every way in, as a function of bytes. Hypothesis and seeded mutations drive them in the default
tests; `make fuzz` drives the same functions with atheris, which looks for bytes that reach new code (`__main__.py`).
"""

import os

FEW = int(os.environ.get("FUZZ_FEW", "100"))  # examples in the default tests
MANY = int(os.environ.get("FUZZ_EXAMPLES", "1000"))  # in test-slow; `make fuzz` asks for ten thousand
