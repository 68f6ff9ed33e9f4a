"""Describe machine, packages, commit and command line without secrets."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jaxllm.version import __version__

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "grpcio", "protobuf", "aiohttp", "transformers", "torch")
_VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_SECRETS = ("--header", "--api-key", "--extra-body")


def describe(argv: Sequence[str] | None = None) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "jaxllm": __version__,
        "commit": commit(),
        "command": hide_secrets(sys.argv if argv is None else argv),
        "python": platform.python_version(),
        "packages": dict(versions(_PACKAGES)),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cpus": usable_cpus(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """Return the commit of the checkout that tracks the package `folder`, with "-dirty" if modified, or None."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    try:
        is_tracked = subprocess.run([*command[:3], "ls-files", "--error-unmatch", "__init__.py"], capture_output=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return (done.stdout.strip() or None) if is_tracked.returncode == 0 else None


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hide_secrets(argv: Sequence[str]) -> list[str]:
    shown: list[str] = []
    is_secret = False
    for argument in argv:
        name, has_value, _ = argument.partition("=")
        if argument.startswith("-"):
            is_secret = name in _SECRETS and not has_value
            shown.append(f"{name}=…" if name in _SECRETS and has_value else argument)
        else:
            shown.append("…" if is_secret else argument)
    return shown


def versions(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
