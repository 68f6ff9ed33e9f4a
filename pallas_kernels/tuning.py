"""How the Triton kernels are divided and compiled, by device and shape: read from tuning.json.

The table is data. `python -m pallas_kernels.tune` measures on a GPU and writes it; rows that were not measured say so
and are what compiles well: no register spilled, on Hopper wgmma for prompts, at the shapes of tests/gpu/resources.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).with_name("tuning.json")
PROCESSORS = {80: 108, 90: 132, 100: 148}  # multiprocessors of A100, H100 and H200, B200


class Tuning(NamedTuple):
    """How a kernel is compiled: threads in groups of 32, and loads that are under way at once."""

    warps: int
    stages: int


class Decode(NamedTuple):
    """Of `paged_decode`: keys that are visited at once, and among how many programs all rows' keys are divided."""

    keys: int
    programs: int  # that a device runs at once, for a head of keys or a block of heads over latents
    splits: int  # of one row at most, where its length alone decides; a power of two
    least_keys: int  # that a program is worth
    tuning: Tuning


class Joined(NamedTuple):
    """Of joining pieces of decode rows: heads and values of a program, and pieces that it loads at once."""

    heads: int
    columns: int
    pieces: int
    tuning: Tuning


class Prefill(NamedTuple):
    """Of `paged_prefill`: rows (query heads of tokens) of a program, and keys that are visited at once."""

    rows: int
    keys: int
    tuning: Tuning


class Latent(NamedTuple):
    """Of latent attention: rows (heads of tokens) of a program, and keys that are visited at once."""

    rows: int
    keys: int
    keys_first: bool  # whether keys are the rows of the scores' product, or its columns
    programs: int  # that a multiprocessor has room for
    tuning: Tuning


class Linear(NamedTuple):
    """Of `linear`: tokens and rows of a weight of a program, columns visited at once, programs that share columns."""

    tokens: int
    rows: int
    columns: int
    splits: int  # at most
    tuning: Tuning


class Experts(NamedTuple):
    """Of `fused_experts`: assignments of a tile, rows of a weight of a program, columns visited at once."""

    assignments: int
    has_halves: bool  # a tile that is at most half full is multiplied as half a tile
    rows: int  # of the second product; the first has half of them for gates, and half for what these multiply
    columns: int
    tuning: Tuning


# Of joining pieces: values of a piece, numbers of all pieces that a program loads at once, and programs at most. With
# many rows most programs only exit, and 8,192 of them took 6.2 us (256 rows of Llama 3 8B on an H100).
JOINED_VALUES, JOINED_NUMBERS, JOINED_PROGRAMS = 128, 4096, 1024
LEAST_KEYS, MOST_SPLITS = 16, 32
RESIDENT = 4  # programs of `paged_decode` on a multiprocessor: 128 threads of at most 128 of its 65,536 registers
# Rows times heads of keys up to which `paged_decode` visits half the keys at once, in half the programs: one row of 1k
# of Llama 3 8B took 4.9 us on an H100, and 6.1 with whole visits.
FEW_HEADS = 16
# Of latent attention. A piece is written and read in float32: for each row as many bytes as about four keys have.
LEAST_LATENTS, LATENTS_OF_A_ROW = 128, 4
# Of `linear`, not measured, by the bits of a number, and 32 for float32 tokens: tokens, rows, columns, warps, stages.
# Three programs of the first kind have 48 KB under way on a multiprocessor of an H200, and Little's law asks for 33.
# With 128 tokens a number becomes a float once for as many products: 4 of 8 clocks that the tensor cores are busy.
LINEAR = {
    8: ((16, 64, 64, 4, 4), (32, 64, 64, 4, 4), (64, 64, 64, 4, 4), (128, 128, 64, 8, 3)),
    4: ((16, 64, 128, 4, 4), (32, 64, 128, 4, 4), (64, 64, 128, 4, 4), (128, 128, 64, 8, 3)),
    32: ((16, 64, 32, 4, 2), (32, 64, 32, 4, 2)),
}
LEAST_STEPS, MOST_LINEAR_SPLITS = 4, 8  # visits that a program is worth
# Of `fused_linear`, of plain products, of those with a norm, and of those with a second matrix: tokens, rows of a
# matrix, columns, warps, stages. Each program reads all tokens, so with many of them it has more rows: tokens are
# tokens / rows of the bytes of weights. The fewer programs a product is, the more loads each has under way: for an
# 8B model at least 33 KB on each multiprocessor of an H200 (tests/gpu/test_interpreted_fused.py).
# Hopper's were measured on an H100 (2026-11-27, Llama-3.1-8B's shapes in CUDA graphs, 991 variants; 2, 16, 32 and 64
# tokens, us): qkv 21.4, not measured, 21.9, 29.8; o 13.8, 14.5, 15.3, 16.2; gate and up 83.6, 85.5, 85.6, 87.8; down
# 42.6, 43.4, 44.4, 47.6. A norm's gain multiplies tokens on their way through shared memory, which wgmma reads once per
# program and other instructions once per warp: few tokens get one warp, or many rows for four. Dividing columns among
# programs was slower (o 15.1, down 43.6, with a second kernel to add), among warps it gained 1 % at most.
_FEW = (8, 32, 256, 4, 5), (16, 32, 256, 4, 5), (32, 64, 128, 8, 6), (64, 64, 128, 8, 6)
_FEW_GATED = (8, 16, 256, 4, 5), (16, 16, 256, 4, 5), (32, 64, 64, 4, 4), (64, 64, 64, 8, 4)
FUSED: dict[int, dict[str, Sequence[tuple[int, int, int, int, int]]]] = {
    80: {"plain": _FEW, "normed": _FEW, "gated": _FEW_GATED},  # not measured
    90: {
        "plain": (_FEW[0], _FEW[1], (32, 16, 256, 2, 5), _FEW[3]),
        "normed": ((8, 16, 256, 1, 4), (16, 64, 128, 8, 6), *_FEW[2:]),
        "gated": ((8, 64, 256, 4, 3), (16, 64, 128, 8, 6), (32, 64, 128, 8, 3), (64, 64, 128, 8, 4)),
    },
    100: {"plain": _FEW, "normed": _FEW, "gated": _FEW_GATED},  # not measured
}
# Of `fused_experts`, not measured here, by the assignments of a tile, and 0 for float32: rows, columns, warps, stages.
# Near to what vLLM measured on an H200 for 128 experts of 768 (fused_moe/configs: 16 x 128 x 128 up to 128 tokens,
# 128 x 256 x 64 from 1,024 on). There a tile has twice what an expert gets on average, so that weights are read once;
# here about as much as that, and halves: of 256 to 8,192 random tokens at most 1.3 times the useful sums, and not 2.0.
EXPERTS = {
    16: (128, 128, 4, 3),
    32: (128, 128, 4, 3),
    64: (128, 64, 4, 4),
    128: (256, 64, 8, 3),
    0: (64, 32, 4, 2),
}
CHOOSE = Tuning(1, 1)
PLANNED = 4096  # assignments that a program of the plan visits at once, 8 with each thread
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
    own = Tuning(found["warps"], found["stages"])
    keys, resident = found["keys"], RESIDENT
    if rows * kv_heads <= FEW_HEADS:
        keys, resident = max(keys // 2, 16), max(resident // 2, 1)
    return _shared(capability, rows, kv_heads, context, keys, resident, max(LEAST_KEYS, keys), own)


def _shared(
    capability: int | None, rows: int, each: int, context: int, keys: int, resident: int, least: int, own: Tuning
) -> Decode:
    """Choose for rows that are `each` so many programs' by themselves, of which a multiprocessor has `resident`."""
    programs = resident * PROCESSORS[generation(capability)]
    splits = 1
    while splits < MOST_SPLITS and 2 * rows * each * splits < programs and splits * least < context:
        splits *= 2
    return Decode(keys, max(programs // each, 1), splits, least, own)


def of_joined(rows: int, heads: int, width: int) -> Joined:
    """Choose for `rows` of `heads`: programs of one warp for few rows, of several heads for many rows."""
    block, columns = 1, min(1 << (width - 1).bit_length(), JOINED_VALUES)
    while 2 * block <= min(heads, 8) and rows * -(-heads // block) > JOINED_PROGRAMS:
        block *= 2
    while columns > 32 and rows * heads * -(-width // columns) < JOINED_PROGRAMS // 4:
        columns //= 2
    pieces = min(max(JOINED_NUMBERS // (block * columns), 2), 32)
    return Joined(block, columns, pieces, Tuning(min(max(block * columns * pieces // 1024, 1), 8), 1))


def of_prefill(capability: int | None, rows: int, head_size: int, dtype: str, cache_dtype: str) -> Prefill:
    """Choose for tiles of so many rows."""
    found = _find("paged_prefill", capability, head_size, dtype, cache_dtype)
    size = found["rows"]
    while size >= 2 * rows and size > 16:
        size //= 2
    return Prefill(size, found["keys"], Tuning(found["warps"] if size == found["rows"] else 4, found["stages"]))


def of_latent(capability: int | None, rows: int, dtype: str, cache_dtype: str) -> Latent:
    """Choose for so many rows: heads of a token, or of a tile of tokens. Not measured yet: what spills no register.

    Products of less than 64 rows are not for Hopper's wgmma. The instructions before it want keys as rows: Triton then
    reads a tile of latents from one place in shared memory for both products (3.6).
    """
    size = max(16, 1 << (rows - 1).bit_length())
    if dtype == "float32":
        return Latent(16, 16, False, 2, Tuning(4, 2))  # with keys as rows Triton 3.9 spills 3 KB, 3.6 nothing
    if cache_dtype not in ("bfloat16", "float16"):
        return Latent(min(size, 32), 16, True, 1, Tuning(8, 3))
    own = generation(capability)
    if size == 16 and own > 80:
        return Latent(16, 32, True, 2, Tuning(8, 3))
    size = min(size, 32 if own == 80 else 64)
    return Latent(size, 32, own != 90 or size < 64, 1, Tuning(8, 4))


def of_latent_decode(capability: int | None, rows: int, heads: int, context: int, chosen: Latent) -> Decode:
    """Divide `rows` sequences of at most `context` tokens, to which `heads` attend as was chosen."""
    least = max(LEAST_LATENTS, LATENTS_OF_A_ROW * chosen.rows)
    blocks = -(-heads // chosen.rows)
    return _shared(capability, rows, blocks, context, chosen.keys, chosen.programs, least, chosen.tuning)


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


def of_fused_linear(
    capability: int | None, tokens: int, rows: int, columns: int, is_gated: bool, is_normed: bool
) -> Linear:
    """Choose for a number of tokens, and the rows and columns of one matrix or two.

    Small matrices get fewer rows per program than the table has, so that there are more programs.
    """
    table = FUSED[generation(capability)]["gated" if is_gated else "normed" if is_normed else "plain"]
    most, size, width, warps, stages = next((one for one in table if tokens <= one[0]), table[-1])
    while size > 16 and -(-rows // size) < PROCESSORS[generation(capability)] // 3:
        size //= 2
    width = min(width, max(16, 1 << (columns - 1).bit_length()))
    return Linear(most, size, width, 1, Tuning(warps, min(stages, 1 + -(-columns // width))))


def of_experts(
    capability: int | None, assignments: int, experts: int, dtype: str, is_deterministic: bool = False
) -> Experts:
    """Choose for so many assignments: a tile has a power of two of them, at most 5/4 of an expert's average."""
    average = assignments // experts
    size = min(max(1 << max((average * 5 // 4).bit_length() - 1, 0), 16), 128)
    rows, columns, warps, stages = EXPERTS[0 if dtype == "float32" else size]
    if generation(capability) == 80:  # whose sums of 256 rows leave no register
        rows = min(rows, 128)
    return Experts(size, average >= 16 and not is_deterministic, rows, columns, Tuning(warps, stages))


def of_plan(assignments: int) -> tuple[int, Tuning]:
    """Choose for the plan of so many assignments: how many are visited at once."""
    block = min(max(1 << (assignments - 1).bit_length(), 128), PLANNED)
    return block, Tuning(max(block // 256, 4), 1)


def fitting(rows: int, size: int) -> int:
    """Halve the rows of a block, down to 32, until those that lie behind the last of `size` are an eighth at most."""
    while rows > 32 and -(-size // rows) * rows * 8 > 9 * size:
        rows //= 2
    return rows


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
