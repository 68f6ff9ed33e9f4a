"""The machine: its packages, and three measured ceilings, to which all other figures are compared.

A ceiling is one program per turn, so that XLA cannot fold turns into one; its compiled HLO is checked to read the array
once. A figure above the card's datasheet is a failure, because the measurement is then wrong.
"""

from __future__ import annotations

import importlib.metadata
import re
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import measuring
from tests.gpu_check.check import Check
from tests.gpu_check.parts import PARTS, missing

READ, COPIED = (4 << 30, 16 << 20), (2 << 30, 8 << 20)  # bytes of the array, on a GPU and dry
SIDE = (8192, 256)  # of the matrices
TURNS, ROUNDS = 8, 5
# Bytes and bfloat16 operations a second of a card's datasheet, by a part of its name; the first match is used.
DATASHEETS = {
    "H100 PCIe": (2.04e12, 756e12),
    "H100 NVL": (3.94e12, 835e12),
    "H100": (3.36e12, 989.5e12),
    "GH200": (4.9e12, 989.5e12),
    "H200": (4.81e12, 989.5e12),
    "A100-SXM4-40GB": (1.56e12, 312e12),
    "A100": (2.04e12, 312e12),
    "GB200": (8e12, 2500e12),
    "B200": (8e12, 2250e12),
}


class Ceiling(NamedTuple):
    """A measurement: a program of a number and arrays, and its work."""

    run: Callable[..., Any]
    arrays: Callable[[], tuple[jax.Array, ...]]
    work: int  # bytes or operations, of all turns in the program
    turns: int = 1  # in the program; each has to read the first array
    donates: bool = False  # its result is the next turn's array


def run(check: Check) -> None:
    device = jax.devices()[0]
    if device.platform != "gpu" and not check.is_dry:
        check.fail(f"JAX sees {device.device_kind} only")
        return
    versions = {}
    for name in ("jax", "jaxlib", "triton", "flax", "llguidance"):
        versions[name] = "absent" if missing((name,)) else importlib.metadata.version(name)
    stats = device.memory_stats() or {}
    # A ceiling that fails is replaced by the datasheet's, so that the other parts still run.
    bandwidth, rate = limits_of(device.device_kind) or (float("nan"), float("nan"))
    found = {"read": bandwidth, "copy": bandwidth, "product": rate}
    for name, ceiling in ceilings(check.is_dry).items():
        with check.guarded(f"the ceiling '{name}'", is_wrong=True):
            found[name] = rate_of(check, name, ceiling)
    check.measure(
        device=device.device_kind,
        capability=str(getattr(device, "compute_capability", "")),
        memory_gb=stats.get("bytes_limit", 0) / 1e9,
        read_bytes_per_second=found["read"],
        copy_bytes_per_second=found["copy"],
        flops_per_second=found["product"],
        **versions,
    )
    for line in above_datasheet(device.device_kind, max(found["read"], found["copy"]), found["product"]):
        check.fail(line)
    for name, part in PARTS.items():
        if absent := missing(part.needs):
            check.not_run(f"{name}: {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed")


def ceilings(is_dry: bool) -> dict[str, Ceiling]:
    """Return the ceilings by name."""
    read, copied, side = READ[is_dry], COPIED[is_dry], SIDE[is_dry]

    def total(turn: jax.Array, array: jax.Array) -> jax.Array:
        return jnp.sum(jnp.abs(array.astype(jnp.float32) + turn))

    def add(turn: jax.Array, array: jax.Array) -> jax.Array:
        return array + turn

    def multiply(_: jax.Array, one: jax.Array, other: jax.Array) -> jax.Array:
        return one @ other

    def matrices() -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(0))
        return tuple(jax.random.normal(key, (side, side), jnp.bfloat16) for key in keys)

    return {
        "read": Ceiling(total, lambda: (measuring.noise((read // 8192, 4096), "bfloat16"),), read),
        "copy": Ceiling(add, lambda: (measuring.noise((copied // 16384, 4096), "float32"),), 2 * copied, donates=True),
        "product": Ceiling(multiply, matrices, 2 * side**3),
    }


def program(ceiling: Ceiling, arrays: tuple[Any, ...], turn: Any = 0.0) -> Any:
    """Lower a ceiling's program; arrays may be descriptions."""
    return jax.jit(ceiling.run, donate_argnums=(1,) if ceiling.donates else ()).lower(turn, *arrays)


def times_read(text: str) -> int:
    """Count how often a compiled program reads its second parameter: each use as an operand.

    A bitcast is followed, because it reads nothing.
    """
    entry = text[text.index("\nENTRY") :]
    found = re.search(r"%([\w.-]+) = \S+ parameter\(1\)", entry)
    if found is None:
        return 0
    names, count = {found[1]}, 0
    for line in entry.splitlines():
        made = re.match(r"\s+(?:ROOT )?%([\w.-]+) = .*? ([\w-]+)\((.*)", line)
        if made is None or not names & set(re.findall(r"%([\w.-]+)", made[3].split("), ")[0])):
            continue
        if made[2] == "bitcast":
            names.add(made[1])
        else:
            count += 1
    return count


def limits_of(device: str) -> tuple[float, float] | None:
    """Return the bytes and operations a second of a card's datasheet; None for an unknown card."""
    return next((own for name, own in DATASHEETS.items() if name in device), None)


def above_datasheet(device: str, bytes_per_second: float, flops_per_second: float) -> list[str]:
    """List the figures above the card's datasheet; an unknown card has no limits."""
    limits = limits_of(device)
    if limits is None:
        return []
    found = []
    if bytes_per_second > limits[0]:
        found.append(f"{bytes_per_second / 1e12:.2f} TB/s were measured, and {device} has {limits[0] / 1e12:.2f}")
    if flops_per_second > limits[1]:
        found.append(f"{flops_per_second / 1e12:.0f} TFLOP/s were measured, and {device} has {limits[1] / 1e12:.0f}")
    return found


def rate_of(check: Check, name: str, ceiling: Ceiling) -> float:
    """Return the work per second: the median over rounds of turns dispatched without waiting."""
    arrays = ceiling.arrays()
    compiled = program(ceiling, arrays, jnp.float32(0)).compile()
    if (reads := times_read(compiled.as_text())) != ceiling.turns:
        check.fail(f"the ceiling '{name}' is wrong: its program of {ceiling.turns} turns reads the array {reads} times")
    turns = [jnp.float32(turn) for turn in range(TURNS)]
    rates = []
    for number in range(ROUNDS + 1):
        began = time.perf_counter()
        for turn in turns:
            made = compiled(turn, *arrays)
            if ceiling.donates:
                arrays = (made,)
        jax.block_until_ready(made)
        if number:  # the first round warms up
            rates.append(ceiling.work * TURNS / (time.perf_counter() - began))
    return statistics.median(rates)
