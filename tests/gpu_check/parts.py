"""The parts of the check: how much of the time each may take, what packages it needs, and where it lies.

Imports nothing but the standard library, so that a missing package is a line and not a crash.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

KERNELS = ("jax", "numpy", "ml_dtypes", "jaxtyping")
ENGINE = (*KERNELS, "flax", "psutil", "tqdm", "tokenizers", "safetensors")
TORCH = ("torch", "transformers")


class Part(NamedTuple):
    """A module of this package."""

    share: int  # of the time, as seconds of ten minutes; what one leaves is divided among those behind it
    needs: tuple[str, ...]
    is_correctness: bool = False  # whether nothing of it may be missing or fail


PARTS = {
    "machine": Part(20, ("jax", "numpy")),
    "correctness": Part(110, KERNELS, is_correctness=True),
    "equality": Part(80, (*ENGINE, *TORCH), is_correctness=True),
    "kernels": Part(90, KERNELS),
    "step": Part(120, ENGINE),
    "graphs": Part(60, ENGINE),
    "throughput": Part(90, ENGINE),
    "questions": Part(30, ENGINE),
}


def missing(names: tuple[str, ...]) -> list[str]:
    """Return the packages that are not installed here."""
    return [name for name in names if importlib.util.find_spec(name) is None]
