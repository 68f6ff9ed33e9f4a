"""The command line of what trains a part of the package that one function makes and another one writes."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run(
    module: str, what: str, train: Callable[[int], tuple[Any, ...]], write: Callable[..., None], tokens: int
) -> None:
    """Train with the seed that is given, and write into the folder that is given; tell how long it took."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=f"Train the {what}.")
    parser.add_argument("--out", type=Path, required=True, help=f"folder to write the {what} to")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    write(*train(options.seed), options.out)
    print(f"{tokens} tokens, {time.monotonic() - started:.0f} s")
