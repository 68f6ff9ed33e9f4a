"""The command line of the programs that train an adapter or a draft head of the embedded model."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run(
    module: str,
    what: str,
    train: Callable[..., tuple[Any, ...]],
    write: Callable[..., None],
    tokens: int,
    can_begin: bool = False,
) -> None:
    """Train with the given seed, write into the given folder, and print the duration.

    With `can_begin`, `train` also takes the folder to continue from, if any.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=f"Train the {what}.")
    parser.add_argument("--out", type=Path, required=True, help=f"folder to write the {what} to")
    parser.add_argument("--seed", type=int, default=0)
    if can_begin:
        parser.add_argument("--begin", type=Path, help=f"folder of an {what}, to be trained a quarter longer")
    options = parser.parse_args()
    started = time.monotonic()
    write(*(train(options.seed, options.begin) if can_begin else train(options.seed)), options.out)
    amount = f"a quarter of {tokens}" if can_begin and options.begin else str(tokens)
    print(f"{amount} tokens, {time.monotonic() - started:.0f} s")
