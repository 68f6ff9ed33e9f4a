"""The time of a decode step of Llama-3.1-8B on one H100, computed as the sum of its kernels' times. Nothing runs.

`python -m tests.gpu.measured_steps` compares it with measured steps and predicts others. All times were measured in
bfloat16 on an H100 80GB HBM3 on 2026-11-27: a step's kernels by JAX's profiler, products in CUDA graphs over weights
that exceed the L2 cache.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import SHAPES
from benchmarks.step_bytes import STORED, cache_bytes, weight_bytes
from jaxllm.families.families import read_spec
from jaxllm.model.spec import Spec
from pallas_kernels import tuning
from pallas_kernels.attention.division import Pieces, evenly
from pallas_kernels.tuning import PROCESSORS, RESIDENT, Decode, Tuning

CAPABILITY = 90
READING = 3.18e12  # bytes a second: a sum over 4 GiB
Times = Mapping[int, float]  # microseconds, by rows
# A layer's products by implementation: qkv, o, gate and up, down. XLA's do not include norms, residuals and activations
# (APART), and its o and down are one sum. A step of one row is a program of two tokens.
PRODUCTS: dict[str, tuple[Times, ...]] = {
    "a9dbdfd": (
        {1: 34.1, 16: 35.8, 32: 21.9, 64: 29.8},
        {1: 13.8, 16: 14.5, 32: 15.5, 64: 16.2},
        {1: 122.3, 16: 122.2, 32: 90.6, 64: 95.2},
        {1: 42.6, 16: 43.4, 32: 45.7, 64: 47.6},
    ),
    "triton": (
        {1: 21.4, 16: 21.9, 32: 21.9, 64: 29.8},
        {1: 13.8, 16: 14.5, 32: 15.3, 64: 16.2},
        {1: 83.6, 16: 85.5, 32: 85.6, 64: 87.8},
        {1: 42.6, 16: 43.4, 32: 44.4, 64: 47.6},
    ),
    "xla": (
        {1: 19.0, 16: 20.6, 64: 22.9, 128: 23.5, 256: 27.5},
        {1: 79.8, 16: 82.4, 64: 88.7, 128: 93.4, 256: 107.0},
        {1: 54.3, 16: 57.2, 64: 66.7, 128: 65.6, 256: 73.0},
    ),
}
MOST_FUSED = max(PRODUCTS["triton"][0])  # rows; XLA computes the products of more
# Further launches of a layer: keys and values, and six of XLA's around its products.
STORE: Times = {1: 1.6, 16: 1.9, 64: 3.1, 256: 8.5}
APART: Times = {1: 1.75, 16: 1.9, 64: 3.35, 128: 4.1, 256: 6.7}
APARTS = 6
HEAD: Times = {1: 348.0, 16: 353.0, 64: 370.0, 128: 400.0, 256: 443.0}
OTHERS, LAUNCH = 16, 1.6  # further launches of a step, and microseconds of a small one in a graph
TOLERANCE = 0.08

FEW = 8  # visits that programs make to a row of 1k
BEFORE = Decode(keys=32, programs=RESIDENT * PROCESSORS[90] // 8, splits=1, least_keys=256, tuning=Tuning(4, 5))


class Attend(NamedTuple):
    """The time of a layer's attention: the longest program's visits in sequence, or the bytes, whichever is longer."""

    visit: float  # microseconds for a program's loads and multiplications: 14.2 us for 8 visits of one row
    start: float  # microseconds of idle memory, at the beginning and the end
    bandwidth: float  # bytes a second otherwise
    combine: Times  # of the kernel that adds pieces, by rows
    few: float | None = None  # microseconds of up to FEW visits, instead of `visit` each

    def microseconds(self, num_bytes: float, visits: int) -> float:
        waiting = visits * self.visit if self.few is None or visits > FEW else self.few
        return max(waiting, self.start + 1e6 * num_bytes / self.bandwidth)


ATTEND = {
    "a9dbdfd": Attend(1.7, 5.0, 2.72e12, {1: 1.9, 16: 2.9, 64: 2.3, 128: 3.8, 256: 6.1}),
    "triton": Attend(1.7, 4.1, 2.98e12, {1: 2.1, 64: 1.9, 256: 1.7}, few=6.0),  # from `make gpu-check`: 1, 64, 256 rows
}


class Measured(NamedTuple):
    """A measured step."""

    name: str
    lengths: Sequence[int]
    products: str
    milliseconds: float
    slower: float = 0.0  # milliseconds, at most, by which its run was slower than the other runs

    def difference(self, found: float) -> float:
        """Return the relative difference from the measured time, or from the nearer end of its range."""
        nearest = min(max(found, self.milliseconds - self.slower), self.milliseconds)
        return found / nearest - 1


STEPS = (
    *(Measured(f"{rows} of 1k", [1024] * rows, "a9dbdfd", one) for rows, one in ((1, 7.74), (16, 8.38), (64, 9.84))),
    Measured("128 of 1k", [1024] * 128, "a9dbdfd", 13.57),
    Measured("256 of 1k", [1024] * 256, "a9dbdfd", 24.3, slower=1.0),
    Measured("16 of 8k", [8192] * 16, "a9dbdfd", 13.7, slower=1.0),
    *(Measured(f"{rows} of 1k, xla", [1024] * rows, "xla", one) for rows, one in ((1, 6.16), (16, 7.0), (64, 10.09))),
    Measured("128 of 1k, xla", [1024] * 128, "xla", 13.6),
    # benchmarks/gpu, 2026-11-27, measured after the constants of products.
    *(
        Measured(f"{rows} of 1k, now", [1024] * rows, "triton", one)
        for rows, one in ((1, 5.83), (16, 6.69), (64, 9.33), (128, 13.22), (256, 19.91))
    ),
    Measured("16 of 8k, now", [8192] * 16, "triton", 11.61),
)


def pieces(lengths: Sequence[int], chosen: Decode, window: int | None = None) -> list[list[int]]:
    """Divide rows' keys among programs as the kernel does; return the number of keys in each piece of each row."""
    divided = evenly(
        jnp.asarray(lengths, jnp.int32), max(lengths), window, chosen.keys, chosen.programs, chosen.least_keys
    )
    found = Pieces(*map(np.asarray, divided))
    keys = found.end - found.begin
    return [keys[first : first + count].tolist() for first, count in zip(found.first, found.count, strict=True)]


def visits(lengths: Sequence[int], kv_heads: int, chosen: Decode) -> list[int]:
    """Return the visits of each program that has any, in the order in which a device starts programs."""
    each = [math.ceil(keys / chosen.keys) for row in pieces(lengths, chosen) for keys in row]
    return [one for one in each if one] * kv_heads


def makespan(durations: Sequence[int], places: int) -> int:
    """Return the end of the last program, with programs started in order, each in the first free place."""
    ends = [0] * places
    for duration in durations:
        heapq.heapreplace(ends, ends[0] + duration)
    return max(ends)


def longest(spec: Spec, lengths: Sequence[int], chosen: Decode | None = None) -> int:
    """Return the number of consecutive visits of a layer's attention; by default with the current division."""
    heads, size = spec.num_kv_heads, spec.head_size
    if chosen is None:
        chosen = tuning.of_decode(CAPABILITY, len(lengths), heads, size, "bfloat16", "bfloat16", max(lengths))
    return makespan(visits(lengths, heads, chosen), RESIDENT * PROCESSORS[CAPABILITY])


def at(times: Times, rows: int) -> float:
    """Return the time for a number of rows, linearly interpolated."""
    return float(np.interp(rows, list(times), list(times.values())))


def milliseconds(spec: Spec, lengths: Sequence[int], products: str, attend: Attend, num_visits: int) -> float:
    """Return the time of a step: its launches run one after another."""
    rows = len(lengths)
    is_fused = products != "xla" and rows <= MOST_FUSED
    layer = sum(at(one, rows) for one in PRODUCTS[products if is_fused else "xla"])
    layer += 0 if is_fused else APARTS * at(APART, rows)
    layer += at(attend.combine, rows) + at(STORE, rows)
    keys = cache_bytes(spec, sum(lengths), is_eight_bit=False) / spec.num_layers
    layer += attend.microseconds(keys, num_visits)
    logits = 1e6 * 4 * rows * spec.vocab_size / READING
    return 1e-3 * (spec.num_layers * layer + at(HEAD, rows) + OTHERS * LAUNCH + logits)


def floor(spec: Spec, lengths: Sequence[int]) -> float:
    """Return the milliseconds for reading weights, keys and values."""
    return 1e3 * (weight_bytes(spec, STORED[0]) + cache_bytes(spec, sum(lengths), is_eight_bit=False)) / READING


def llama() -> Spec:
    """Return the measured model."""
    return read_spec(dict(SHAPES["llama-3.1-8b"]))[0]


def compared() -> Iterator[tuple[Measured, float]]:
    """Yield each measured step and its computed milliseconds."""
    spec = llama()
    for one in STEPS:
        name, chosen = ("triton", None) if one.products == "triton" else ("a9dbdfd", BEFORE)
        found = milliseconds(spec, one.lengths, one.products, ATTEND[name], longest(spec, one.lengths, chosen))
        yield one, found


def lines() -> Iterator[str]:
    """Yield the lines of both tables."""
    spec = llama()
    yield "| step | measured, ms | computed, ms | difference |"
    yield "| --- " * 4 + "|"
    for one, found in compared():
        measured = f"{one.milliseconds - one.slower:.2f} to " * (one.slower > 0) + f"{one.milliseconds:.2f}"
        yield f"| {one.name} | {measured} | {found:.2f} | {100 * one.difference(found):+.1f} % |"
    yield ""
    yield "| rows of 1k | floor, ms | computed, ms | × floor |"
    yield "| --- " * 4 + "|"
    for rows in (1, 16, 32, 64, 128, 256):
        lengths = [1024] * rows
        least = floor(spec, lengths)
        found = milliseconds(spec, lengths, "triton", ATTEND["triton"], longest(spec, lengths))
        yield f"| {rows} | {least:.2f} | {found:.2f} | {found / least:.2f} |"


if __name__ == "__main__":
    print("\n".join(lines()))
