"""How the Triton kernels are divided and compiled, by device and shape: read from tuning.json.

The table is data. `python -m pallas_kernels.tune` measures on a GPU and writes it; rows that were not measured say so
and are what compiles well: no register spilled, on Hopper wgmma for prompts, at the shapes of tests/gpu/resources.py.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).with_name("tuning.json")
PROCESSORS = {80: 108, 90: 132, 100: 148}  # multiprocessors of A100, H100 and H200, B200


class Tuning(NamedTuple):
    """How a kernel is compiled: threads in groups of 32, and loads that are under way at once."""

    warps: int
    stages: int


class Decode(NamedTuple):
    """Of `paged_decode`: keys that are visited at once, and among how many programs a row's context is divided."""

    keys: int
    splits: int  # at most; a power of two
    least_keys: int  # that a program is worth
    tuning: Tuning


class Prefill(NamedTuple):
    """Of `paged_prefill`: rows (query heads of tokens) of a program, and keys that are visited at once."""

    rows: int
    keys: int
    tuning: Tuning


class Linear(NamedTuple):
    """Of `linear`: tokens and rows of a weight of a program, columns visited at once, programs that share columns."""

    tokens: int
    rows: int
    columns: int
    splits: int  # at most
    tuning: Tuning


COMBINE = Tuning(2, 1)
COPY, COPIED = Tuning(4, 1), 2048  # numbers of a block that a program copies
LEAST_KEYS, MOST_SPLITS = 256, 32
# Of `linear`, not measured, by the bits of a number, and 32 for float32 tokens: tokens, rows, columns, warps, stages.
# Three programs of the first kind have 48 KB under way on a multiprocessor of an H200, and Little's law asks for 33.
# With 128 tokens a number becomes a float once for as many products: 4 of 8 clocks that the tensor cores are busy.
LINEAR = {
    8: ((16, 64, 64, 4, 4), (32, 64, 64, 4, 4), (64, 64, 64, 4, 4), (128, 128, 64, 8, 3)),
    4: ((16, 64, 128, 4, 4), (32, 64, 128, 4, 4), (64, 64, 128, 4, 4), (128, 128, 64, 8, 3)),
    32: ((16, 64, 32, 4, 2), (32, 64, 32, 4, 2)),
}
LEAST_STEPS, MOST_LINEAR_SPLITS = 4, 8  # visits that a program is worth
# Of `sample`, which was not measured: columns of a program.
SURVEY, SURVEYED, FINISH = Tuning(4, 1), 2048, Tuning(1, 1)
# Of rows with filters: columns of a group whose largest logit is remembered, bins of a row, tokens of a program whose
# noise is made at once, and listed tokens that are compared with 16 bounds at once.
GROUPED, BINS, DRAWN, SEARCHED = 256, 1024, 512, 512
FRAME, SETTLE = Tuning(4, 1), Tuning(8, 1)


def generation(capability: int | None) -> int:
    """Return the capability of the table that stands for a GPU: 80, 90 or 100. In Triton's interpreter it is None."""
    return max(one for one in PROCESSORS if one <= max(capability or 0, min(PROCESSORS)))


def of_decode(
    capability: int | None, rows: int, kv_heads: int, head_size: int, dtype: str, cache_dtype: str, context: int
) -> Decode:
    """Choose for `rows` sequences of at most `context` tokens."""
    found = _find("paged_decode", capability, head_size, dtype, cache_dtype)
    programs = 2 * PROCESSORS[generation(capability)]
    splits = 1
    while splits < MOST_SPLITS and rows * kv_heads * splits < programs and splits * LEAST_KEYS < context:
        splits *= 2
    return Decode(found["keys"], splits, LEAST_KEYS, Tuning(found["warps"], found["stages"]))


def of_prefill(capability: int | None, rows: int, head_size: int, dtype: str, cache_dtype: str) -> Prefill:
    """Choose for tiles of so many rows."""
    found = _find("paged_prefill", capability, head_size, dtype, cache_dtype)
    size = found["rows"]
    while size >= 2 * rows and size > 16:
        size //= 2
    return Prefill(size, found["keys"], Tuning(found["warps"] if size == found["rows"] else 4, found["stages"]))


def of_linear(capability: int | None, tokens: int, rows: int, columns: int, kind: str, dtype: str) -> Linear:
    """Choose for so many tokens and a weight of so many rows and columns. Not measured yet: see LINEAR."""
    own = LINEAR[32 if dtype == "float32" else 4 if kind in ("int4", "float4") else 8]
    most, size, width, warps, stages = next((one for one in own if tokens <= one[0]), own[-1])
    programs = -(-tokens // most) * -(-rows // size)
    splits = 1
    while splits < MOST_LINEAR_SPLITS and programs * splits < 2 * PROCESSORS[generation(capability)]:
        if columns < 2 * splits * LEAST_STEPS * width:
            break
        splits *= 2
    return Linear(most, size, width, splits, Tuning(warps, stages))


def write_tokens(tokens: int) -> int:
    """Return how many tokens one program of `write_kv` takes."""
    return 1 if tokens < 1024 else 8


def write(block: int) -> Tuning:
    """Choose for `write_kv` with so many tokens in a program."""
    return Tuning(1 if block == 1 else 4, 1)


def _find(operation: str, capability: int | None, head_size: int, dtype: str, cache_dtype: str) -> dict[str, Any]:
    """Find the row of the smallest heads that are large enough."""
    # What is multiplied has the queries' type, whatever the cache's is.
    bits = 32 if dtype == "float32" else 16 if cache_dtype in ("bfloat16", "float16") else 8
    wanted = operation, generation(capability), bits
    fitting = [
        row
        for row in table()
        if (row["operation"], row["capability"], row["cache_bits"]) == wanted and row["head_size"] >= head_size
    ]
    return min(fitting, key=lambda row: row["head_size"])


@functools.cache
def table() -> list[dict[str, Any]]:
    """Read the table."""
    return json.loads(PATH.read_text())
