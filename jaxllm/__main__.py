"""`python -m jaxllm`: the command line, see cli.py."""

import sys

from jaxllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
