"""The parts of the check, the most important first, with their shares of the time and of the device's memory.

Imports only the standard library, so that a missing package is reported and not a crash.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import NamedTuple

KERNELS = ("jax", "numpy", "ml_dtypes", "jaxtyping")
ENGINE = (
    *(*KERNELS, "flax", "orbax.checkpoint", "psutil", "tqdm", "tokenizers", "safetensors", "msgpack"),
    *("huggingface_hub", "jinja2", "llguidance"),
)


class Part(NamedTuple):
    """A module of this package that runs in a process with exclusive use of the device."""

    seconds: int  # of eight minutes; unused time is shared by the later parts
    needs: tuple[str, ...]
    memory: float  # the largest share of the device's memory per process
    is_correctness: bool = False  # no check may be missing or fail
    is_optional: bool = False  # runs only if it is named
    environment: Mapping[str, str] = {}  # variables added to its process


# Read by the CUDA plugin when it is loaded.
GRAPHS_LOGGED = {
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "TF_CPP_VMODULE": "command_buffer_thunk=3,command_buffer_cmd=6,command=6,traced_command_buffer=6",
}
# Compare tokens and numbers with XLA's default kernels: to time many kernels for each product takes most of a minute.
NOT_TUNED = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
PARTS = {
    "machine": Part(15, ("jax", "numpy"), 0.9),
    "model": Part(115, ENGINE, 0.94),
    "features": Part(215, ENGINE, 0.08, is_correctness=True, environment=NOT_TUNED),
    "graphs": Part(15, ENGINE, 0.94, environment=GRAPHS_LOGGED),
    "starts": Part(40, ENGINE, 0.94),
    "correctness": Part(80, KERNELS, 0.9, is_correctness=True, environment=NOT_TUNED),
    "kernels": Part(120, KERNELS, 0.9, is_optional=True),
}


def missing(names: tuple[str, ...]) -> list[str]:
    """Return the packages that are not installed here."""
    return [name for name in names if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the containing package is missing
        return False
