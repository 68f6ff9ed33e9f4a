"""The cost of decode steps of Llama-3.1-8B on an H100: `python -m tests.gpu.step_costs` prints the tables.

Nothing runs. Kernels are counted in the program that XLA compiles; attention's programs are those of its grid, with the
registers and the shared memory of its machine code. Times are those of measured_steps.py. pallas_kernels/README.md has
the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

import pallas_kernels
from benchmarks.shapes import SHAPES
from benchmarks.step_bytes import STORED, cache_bytes, weight_bytes
from jaxllm.model.spec import Spec
from pallas_kernels import tuning
from pallas_kernels.tuning import PROCESSORS
from tests.gpu import aot, conftest, measured_steps, resources, sass
from tests.gpu.measured_steps import ATTEND, makespan, visits

assert conftest  # gives XLA an assembler
CAPABILITY = 90
BLOCK = 16
ROWS = (1, 4, 16, 33, 64, 256)
BATCHES = {f"{rows} of {context // 1024}k": [context] * rows for context in (1024, 16384) for rows in (1, 64, 256)}
BATCHES["1 of 32k, 63 of 512"] = [32768] + [512] * 63


class Attention(NamedTuple):
    """The use of a device by a layer's attention."""

    waves: float
    visits: int  # consecutive, from the start of the first program to the end of the last


class Cost(NamedTuple):
    """The cost of a step."""

    num_bytes: int
    kernels: int
    attention: Attention
    milliseconds: float
    floor: float  # milliseconds: bytes alone


def attention(spec: Spec, lengths: Sequence[int]) -> Attention:
    """Compile a layer's kernel and place its programs on the device."""
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
    """Return the cost of a step."""
    num_bytes = weight_bytes(spec, STORED[0]) + cache_bytes(spec, sum(lengths), is_eight_bit=False)
    found = measured_steps.milliseconds(spec, lengths, "triton", ATTEND["triton"], attention.visits)
    return Cost(num_bytes, kernels, attention, found, measured_steps.floor(spec, lengths))


def filled(spec: Spec) -> Iterator[str]:
    """Yield the lines of a table: waves and visits of attention, by rows and contexts."""
    yield "| context of each row | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |"
    yield "| --- " * (1 + len(ROWS)) + "|"
    for context in (1024, 16384):
        found = [attention(spec, [context] * rows) for rows in ROWS]
        yield " | ".join([f"| {context}", *(f"{one.waves:.2f}, {one.visits}" for one in found)]) + " |"


def lines() -> Iterator[str]:
    """Yield the lines of all tables."""
    spec = measured_steps.llama()
    kernels = {rows: aot.compile_step(SHAPES["llama-3.1-8b"], rows=rows).kernels for rows in (2, 64, 256)}
    yield "| rows, contexts | GB | kernels | waves | visits | ms | of bytes alone |"
    yield "| --- " * 7 + "|"
    for name, lengths in BATCHES.items():
        one = cost(spec, lengths, kernels[max(2, len(lengths))], attention(spec, lengths))
        cells = [name, f"{one.num_bytes / 1e9:.1f}", f"{one.kernels}", f"{one.attention.waves:.2f}"]
        cells += [f"{one.attention.visits}", f"{one.milliseconds:.1f}", f"{one.milliseconds / one.floor:.2f} ×"]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from filled(spec)
    yield ""
    yield from measured_steps.lines()


if __name__ == "__main__":
    print("\n".join(lines()))
