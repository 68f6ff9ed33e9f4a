"""Kernels by duration, from JAX's profiler, with their bytes if known."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

_WIDTHS = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "f8e4m3fn": 1, "pred": 1, "s4": 1}
_NO_KERNEL = ("end: ", "Threadpool", "ThunkExecutor")  # of a CPU's threads


class Kernel(NamedTuple):
    """All launches of a kernel in a step."""

    name: str
    launches: float
    microseconds: float  # total


def measure(run: Callable[[], Any], steps: int) -> list[Kernel]:
    """Return the kernels of `run`, which runs `steps` steps, longest first."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    on_gpu = jax.default_backend() == "gpu"
    found: dict[str, list[float]] = {}
    for plane in data.planes:
        for line in plane.lines:
            is_stream = plane.name.startswith("/device:GPU") and "Stream" in line.name
            is_thread = plane.name == "/host:CPU" and line.name.startswith("tf_XLA")
            if not (is_stream if on_gpu else is_thread):
                continue
            for event in line.events:
                if on_gpu or not event.name.startswith(_NO_KERNEL):
                    own = found.setdefault(event.name, [0, 0.0])
                    own[0] += 1
                    own[1] += event.duration_ns
    if not found:
        raise RuntimeError("the profiler saw no kernel of the device")
    kernels = [Kernel(name, count / steps, taken / 1e3 / steps) for name, (count, taken) in found.items()]
    return sorted(kernels, key=lambda one: -one.microseconds)


def product_bytes(text: str) -> dict[str, int]:
    """Return the bytes that each fusion with a product moves, by its name in a profile, from compiled HLO."""
    multiplies = {
        found[1] for found in re.finditer(r"^%([\w.-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S) if " dot(" in found[2]
    }
    sizes, found = {}, {}
    for line in text[text.index("\nENTRY") :].splitlines() if "\nENTRY" in text else ():
        made = re.match(r"\s+(?:ROOT )?%([\w.-]+) = (\([^=]*?\)|\S+) ([\w-]+)\(([^)]*)\)(.*)", line)
        if made is None:
            continue
        name, kind, operation, operands, rest = made.groups()
        sizes[name] = num_bytes(kind)
        calls = re.search(r"calls=%([\w.-]+)", rest)
        if operation == "fusion" and calls and calls[1] in multiplies:
            given = sum(sizes.get(one, 0) for one in re.findall(r"%([\w.-]+)", operands))
            found[re.sub(r"[.-]", "_", name)] = given + sizes[name]
    return found


def num_bytes(kind: str) -> int:
    """Return the bytes of arrays of a type in HLO."""
    found = re.findall(r"(\w+)\[([\d,]*)\]", kind)
    return sum(_WIDTHS.get(name, 0) * math.prod(int(one) for one in dims.split(",") if one) for name, dims in found)


def bytes_of(kernel: str, products: dict[str, int], known: dict[str, int]) -> int | None:
    """Return the bytes of one launch of an XLA product or of a `known` kernel; None for other kernels."""
    own = next((size for name, size in known.items() if name in kernel), None)
    return own or products.get(kernel) or products.get(re.sub(r"_+\d+$", "", kernel))
