"""What a decode step of Llama-3.1-8B costs an H200, by arithmetic: `python -m tests.gpu.step_costs` prints the table.

Nothing runs. Bytes are those that must be read; kernels are counted in the program that XLA compiles; attention's
programs are those of its grid, with the registers and the shared memory that its machine code takes. The table is that
of pallas_kernels/README.md: what a change is worth before a GPU has measured it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from jaxllm.model.families import read_spec
from jaxllm.model.spec import Spec
from pallas_kernels import tuning
from pallas_kernels.attention.division import Pieces, evenly
from pallas_kernels.tuning import PROCESSORS, Decode
from tests.benchmarks.shapes import SHAPES
from tests.benchmarks.step_bytes import BANDWIDTH, STORED, cache_bytes, weight_bytes
from tests.gpu import aot, conftest, resources, sass

assert conftest  # it finds XLA an assembler
CAPABILITY = 90
BLOCK = 16
ROWS = (1, 4, 16, 33, 64, 256)
# Not measured here: of products (measured on an H200, its data sheet says 989), of a launch in a CUDA graph, and of a
# visit of a program that waits for its loads: a memory's latency and the products behind it.
FLOPS = 790e12  # a second
LAUNCH = 1.5e-6, 2.5e-6  # seconds
VISIT = 0.3e-6, 0.6e-6  # seconds
BATCHES = {f"{rows} of {context // 1024}k": [context] * rows for context in (1024, 16384) for rows in (1, 64, 256)}
BATCHES["1 of 32k, 63 of 512"] = [32768] + [512] * 63
# Kernels, waves, visits and milliseconds of commit 625414e, which the others are compared with.
BEFORE: dict[str, tuple[int, float, int, float, float]] = {
    "1 of 1k": (348, 0.08, 4, 4.1, 4.4),
    "64 of 1k": (315, 1.29, 32, 6.0, 6.3),
    "256 of 1k": (316, 5.17, 96, 13.3, 13.6),
    "1 of 16k": (348, 0.65, 8, 4.5, 4.9),
    "64 of 16k": (315, 1.29, 512, 35.9, 36.2),
    "256 of 16k": (316, 5.17, 1536, 133.2, 133.5),
    "1 of 32k, 63 of 512": (315, 1.29, 520, 9.0, 14.3),
}


class Attention(NamedTuple):
    """How a layer's attention fills a device."""

    waves: float
    visits: int  # one after another, from the first program's beginning to the last one's end


class Cost(NamedTuple):
    """What a step costs."""

    num_bytes: int
    kernels: int
    attention: Attention
    milliseconds: tuple[float, float]  # at the least and at the most of LAUNCH and VISIT
    floor: float  # milliseconds: bytes alone


def pieces(lengths: Sequence[int], chosen: Decode, window: int | None = None) -> list[list[int]]:
    """Divide rows' keys among programs as the kernel does: how many keys each piece of each row has."""
    divided = evenly(
        jnp.asarray(lengths, jnp.int32), max(lengths), window, chosen.keys, chosen.programs, chosen.least_keys
    )
    found = Pieces(*map(np.asarray, divided))
    keys = found.end - found.begin
    return [keys[first : first + count].tolist() for first, count in zip(found.first, found.count, strict=True)]


def visits(lengths: Sequence[int], kv_heads: int, chosen: Decode) -> list[int]:
    """Count the visits of each program that has any, in the order in which a device begins programs."""
    each = [math.ceil(keys / chosen.keys) for row in pieces(lengths, chosen) for keys in row]
    return [one for one in each if one] * kv_heads


def makespan(durations: Sequence[int], places: int) -> int:
    """Run programs in order, so many at once, each in the first place that is free; return when the last one ends."""
    ends = [0] * places
    for duration in durations:
        heapq.heapreplace(ends, ends[0] + duration)
    return max(ends)


def attention(spec: Spec, lengths: Sequence[int]) -> Attention:
    """Compile the kernel of a layer and lay its programs out on the device."""
    heads, size, rows = (spec.num_heads, spec.num_kv_heads), spec.head_size, len(lengths)
    table = max(lengths) // BLOCK
    cache = jax.ShapeDtypeStruct((rows * table, heads[1], BLOCK, size), "bfloat16")
    ints = partial(jax.ShapeDtypeStruct, dtype="int32")
    q = jax.ShapeDtypeStruct((rows, heads[0], size), "bfloat16")
    chosen = tuning.of_decode(CAPABILITY, rows, heads[1], size, "bfloat16", "bfloat16", table * BLOCK)

    def call(implementation: Any, *arrays: Any) -> Any:
        return pallas_kernels.paged_decode(*arrays, scale=1.0, implementation=implementation)

    arrays = (q, cache, cache, ints((rows, table)), ints((rows,)))
    one = next(each for each in sass.launches(call, arrays, CAPABILITY) if each.name == "attend_piece")
    taken = resources.read(one.compiled)
    held = sass.at_once(int(taken["registers"]), int(taken["shared"]), one.tuning.warps, CAPABILITY)
    programs = visits(lengths, heads[1], chosen)
    places = held * PROCESSORS[CAPABILITY]
    return Attention(sass.waves(len(programs), held, CAPABILITY), makespan(programs, places))


def cost(spec: Spec, lengths: Sequence[int], kernels: int, attention: Attention) -> Cost:
    """Add up a step: products at the speed of memory or of the tensor cores, attention at that of memory or of visits.

    Nothing of one kernel runs beside another's, and products are as good as they can be.
    """
    weights = weight_bytes(spec, STORED[0])
    keys = cache_bytes(spec, sum(lengths), is_eight_bit=False)
    products = max(weights / BANDWIDTH, weights * len(lengths) / FLOPS)  # two bytes and two operations for each weight
    took = [
        products + max(keys / BANDWIDTH, spec.num_layers * attention.visits * visit) + kernels * launch
        for launch, visit in zip(LAUNCH, VISIT, strict=True)
    ]
    least, most = (1e3 * each for each in took)
    return Cost(weights + keys, kernels, attention, (least, most), 1e3 * (weights + keys) / BANDWIDTH)


def filled(spec: Spec) -> Iterator[str]:
    """Write how often attention fills the device, and its visits, by rows and contexts."""
    yield "| context of each row | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |"
    yield "| --- " * (1 + len(ROWS)) + "|"
    for context in (1024, 16384):
        found = [attention(spec, [context] * rows) for rows in ROWS]
        yield " | ".join([f"| {context}", *(f"{one.waves:.2f}, {one.visits}" for one in found)]) + " |"


def lines() -> Iterator[str]:
    """Write the tables."""
    shape = SHAPES["llama-3.1-8b"]
    spec, _ = read_spec(dict(shape))
    kernels = {rows: aot.compile_step(shape, rows=rows).kernels for rows in (2, 64, 256)}  # the smallest has 2
    yield "| rows, contexts | GB | kernels | waves | visits | ms | of bytes alone | 625414e: all four |"
    yield "| --- " * 8 + "|"
    for name, lengths in BATCHES.items():
        one = cost(spec, lengths, kernels[max(2, len(lengths))], attention(spec, lengths))
        least, most = one.milliseconds
        cells = [name, f"{one.num_bytes / 1e9:.1f}", f"{one.kernels}", f"{one.attention.waves:.2f}"]
        cells += [f"{one.attention.visits}", f"{least:.1f} to {most:.1f}"]
        cells += [f"{least / one.floor:.2f} to {most / one.floor:.2f} ×"]
        cells += ["{}, {:.2f}, {}, {:.1f} to {:.1f}".format(*BEFORE[name])] if name in BEFORE else [""]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from filled(spec)


if __name__ == "__main__":
    print("\n".join(lines()))
