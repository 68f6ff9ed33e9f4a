"""Tuning parameters of the Triton kernels by device and shape, from tuning.json.

Unmeasured rows are marked; they do not spill registers at the shapes of tests/gpu/resources.py, and use wgmma for
prompts on Hopper.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).with_name("tuning.json")
PROCESSORS = {80: 108, 90: 132, 100: 148}  # multiprocessors: A100, H100 and H200, B200


class Tuning(NamedTuple):
    """A kernel's warps and pipeline stages."""

    warps: int
    stages: int


class Decode(NamedTuple):
    """`paged_decode`: keys per iteration, and division of rows."""

    keys: int
    programs: int  # concurrent, per KV head or block of latent heads
    splits: int  # most per row, in `by_own_length`; a power of two
    least_keys: int  # per program
    tuning: Tuning


class Joined(NamedTuple):
    """Combining pieces: heads, values and pieces per program."""

    heads: int
    columns: int
    pieces: int
    tuning: Tuning


class Prefill(NamedTuple):
    """`paged_prefill`: rows (query heads of tokens) per program, keys per iteration."""

    rows: int
    keys: int
    tuning: Tuning


class Latent(NamedTuple):
    """Latent attention: rows (heads of tokens) per program, keys per iteration."""

    rows: int
    keys: int
    keys_first: bool  # keys are rows of the scores
    programs: int  # per multiprocessor
    tuning: Tuning


class Linear(NamedTuple):
    """`linear`: tokens and weight rows per program, columns per iteration."""

    tokens: int
    rows: int
    columns: int
    splits: int  # most programs that share columns
    tuning: Tuning


class Experts(NamedTuple):
    """`fused_experts`: assignments per tile, weight rows per program, columns per iteration."""

    assignments: int
    has_halves: bool  # half-full tiles are half tiles
    rows: int  # of the second product; the first has half for gates
    columns: int
    tuning: Tuning


# Combining pieces: values of a piece, numbers loaded at once, most programs; 8,192 took 6.2 us for 256 rows of Llama 3
# 8B on an H100.
JOINED_VALUES, JOINED_NUMBERS, JOINED_PROGRAMS = 128, 4096, 1024
LEAST_KEYS, MOST_SPLITS = 16, 32
RESIDENT = 4  # programs of `paged_decode` per multiprocessor: 128 threads of at most 128 of 65,536 registers
# Rows times KV heads up to which `paged_decode` halves keys per iteration and programs: a row of 1k of Llama 3 8B took
# 4.9 us on an H100, not 6.1.
FEW_HEADS = 16
# Latent attention. A piece costs, per row, the bytes of about four keys.
LEAST_LATENTS, LATENTS_OF_A_ROW = 128, 4
# `linear`, not measured; by bits of a number, 32 for float32 tokens: tokens, rows, columns, warps, stages.
LINEAR = {
    8: ((16, 64, 64, 4, 4), (32, 64, 64, 4, 4), (64, 64, 64, 4, 4), (128, 128, 64, 8, 3)),
    4: ((16, 64, 128, 4, 4), (32, 64, 128, 4, 4), (64, 64, 128, 4, 4), (128, 128, 64, 8, 3)),
    32: ((16, 64, 32, 4, 2), (32, 64, 32, 4, 2)),
}
LEAST_STEPS, MOST_LINEAR_SPLITS = 4, 8  # least iterations per program
# `fused_linear`: plain products, with a norm, and gated: tokens, rows of a matrix, columns, warps, stages. Each program
# reads all tokens, so more tokens get more rows. Fewer programs get more loads in flight: for an 8B model at least 33
# KB per multiprocessor of an H200 (tests/gpu/test_interpreted_fused.py). Hopper: 991 variants on an H100, 2026-11-27,
# Llama-3.1-8B's shapes in CUDA graphs; us for 2, 16, 32 and 64 tokens: qkv 21.4, not measured, 21.9, 29.8; o 13.8,
# 14.5, 15.3, 16.2; gate and up 83.6, 85.5, 85.6, 87.8; down 42.6, 43.4, 44.4, 47.6. wgmma reads tokens times gains from
# shared memory once per program, other instructions once per warp: few tokens get one warp, or many rows for four. More
# than NORMED_INSIDE tokens have a separate norm kernel: with it, and fused, qkv of 64 tokens takes 28.9 and 36.9 us, of
# 16 tokens 33.9 and 25.3 (H200).
NORMED_INSIDE = 16
_FEW = (8, 32, 256, 4, 5), (16, 32, 256, 4, 5), (32, 64, 128, 8, 6), (64, 64, 128, 8, 6)
_FEW_GATED = (8, 16, 256, 4, 5), (16, 16, 256, 4, 5), (32, 64, 64, 4, 4), (64, 64, 64, 8, 4)
FUSED: dict[int, dict[str, Sequence[tuple[int, int, int, int, int]]]] = {
    80: {"plain": _FEW, "normed": _FEW, "gated": _FEW_GATED},  # not measured
    90: {
        "plain": (_FEW[0], _FEW[1], (32, 16, 256, 2, 5), _FEW[3]),
        "normed": ((8, 16, 256, 1, 4), (16, 64, 128, 8, 6), *_FEW[2:]),
        "gated": ((8, 64, 256, 4, 3), (16, 64, 128, 8, 6), (32, 64, 128, 8, 3), (64, 64, 128, 8, 4)),
    },
    100: {"plain": _FEW, "normed": _FEW, "gated": _FEW_GATED},
}
# `fused_experts`, not measured; by assignments of a tile, 0 for float32: rows, columns, warps, stages. Close to vLLM's
# measurements on an H200 for 128 experts of 768 (fused_moe/configs), with tiles of about an expert's average, not
# twice.
EXPERTS = {
    16: (128, 128, 4, 3),
    32: (128, 128, 4, 3),
    64: (128, 64, 4, 4),
    128: (256, 64, 8, 3),
    0: (64, 32, 4, 2),
}
CHOOSE = Tuning(1, 1)
PLANNED = 4096  # per iteration of `plan`, 8 per thread
# `sample`, not measured.
SURVEY, SURVEYED, FINISH = Tuning(4, 1), 2048, Tuning(1, 1)
# With filters: columns per group, bins per row, tokens with noise per iteration, listed tokens compared with 16 bounds.
GROUPED, BINS, DRAWN, SEARCHED = 256, 1024, 512, 512
FRAME, SETTLE = Tuning(4, 1), Tuning(8, 1)


def generation(capability: int | None) -> int:
    return max(one for one in PROCESSORS if one <= max(capability or 0, min(PROCESSORS)))


def of_decode(
    capability: int | None, rows: int, kv_heads: int, head_size: int, dtype: str, cache_dtype: str, context: int
) -> Decode:
    found = _find("paged_decode", capability, head_size, dtype, cache_dtype)
    own = Tuning(found["warps"], found["stages"])
    keys, resident = found["keys"], RESIDENT
    if rows * kv_heads <= FEW_HEADS:
        keys, resident = max(keys // 2, 16), max(resident // 2, 1)
    return _shared(capability, rows, kv_heads, context, keys, resident, max(LEAST_KEYS, keys), own)


def _shared(
    capability: int | None, rows: int, each: int, context: int, keys: int, resident: int, least: int, own: Tuning
) -> Decode:
    programs = resident * PROCESSORS[generation(capability)]
    splits = 1
    while splits < MOST_SPLITS and 2 * rows * each * splits < programs and splits * least < context:
        splits *= 2
    return Decode(keys, max(programs // each, 1), splits, least, own)


def of_joined(rows: int, heads: int, width: int) -> Joined:
    block, columns = 1, min(1 << (width - 1).bit_length(), JOINED_VALUES)
    while 2 * block <= min(heads, 8) and rows * -(-heads // block) > JOINED_PROGRAMS:
        block *= 2
    while columns > 32 and rows * heads * -(-width // columns) < JOINED_PROGRAMS // 4:
        columns //= 2
    pieces = min(max(JOINED_NUMBERS // (block * columns), 2), 32)
    return Joined(block, columns, pieces, Tuning(min(max(block * columns * pieces // 1024, 1), 8), 1))


def of_prefill(capability: int | None, rows: int, head_size: int, dtype: str, cache_dtype: str) -> Prefill:
    found = _find("paged_prefill", capability, head_size, dtype, cache_dtype)
    size = found["rows"]
    while size >= 2 * rows and size > 16:
        size //= 2
    return Prefill(size, found["keys"], Tuning(found["warps"] if size == found["rows"] else 4, found["stages"]))


def of_latent(capability: int | None, rows: int, dtype: str, cache_dtype: str) -> Latent:
    """Return unmeasured settings of latent prefill, without register spills.

    wgmma requires 64 rows. Earlier instructions prefer keys as rows: Triton 3.6 has one copy in shared memory for both
    products.
    """
    size = max(16, 1 << (rows - 1).bit_length())
    if dtype == "float32":
        return Latent(16, 16, False, 2, Tuning(4, 2))  # keys as rows spill 3 KB in Triton 3.9
    if cache_dtype not in ("bfloat16", "float16"):
        return Latent(min(size, 32), 16, True, 1, Tuning(8, 3))
    own = generation(capability)
    if size == 16 and own > 80:
        return Latent(16, 32, True, 2, Tuning(8, 3))
    size = min(size, 32 if own == 80 else 64)
    return Latent(size, 32, own != 90 or size < 64, 1, Tuning(8, 4))


def of_latent_decode(capability: int | None, rows: int, heads: int, context: int, chosen: Latent) -> Decode:
    least = max(LEAST_LATENTS, LATENTS_OF_A_ROW * chosen.rows)
    blocks = -(-heads // chosen.rows)
    return _shared(capability, rows, blocks, context, chosen.keys, chosen.programs, least, chosen.tuning)


def of_linear(capability: int | None, tokens: int, rows: int, columns: int, kind: str, dtype: str) -> Linear:
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
    """Return the settings of `fused_linear`; small matrices get fewer rows, for more programs."""
    table = FUSED[generation(capability)]["gated" if is_gated else "normed" if is_normed else "plain"]
    most, size, width, warps, stages = next((one for one in table if tokens <= one[0]), table[-1])
    while size > 16 and -(-rows // size) < PROCESSORS[generation(capability)] // 3:
        size //= 2
    width = min(width, max(16, 1 << (columns - 1).bit_length()))
    return Linear(most, size, width, 1, Tuning(warps, min(stages, 1 + -(-columns // width))))


def of_experts(
    capability: int | None, assignments: int, experts: int, dtype: str, is_deterministic: bool = False
) -> Experts:
    """Return the settings of `fused_experts`: tiles of at most 5/4 of an expert's average.

    `is_deterministic` forbids half tiles.
    """
    average = assignments // experts
    size = min(max(1 << max((average * 5 // 4).bit_length() - 1, 0), 16), 128)
    rows, columns, warps, stages = EXPERTS[0 if dtype == "float32" else size]
    if generation(capability) == 80:  # 256 rows exhaust its registers
        rows = min(rows, 128)
    return Experts(size, average >= 16 and not is_deterministic, rows, columns, Tuning(warps, stages))


def of_plan(assignments: int) -> tuple[int, Tuning]:
    block = min(max(1 << (assignments - 1).bit_length(), 128), PLANNED)
    return block, Tuning(max(block // 256, 4), 1)


def fitting(rows: int, size: int) -> int:
    """Halve a block's rows, down to 32, until padding is at most an eighth of `size`."""
    while rows > 32 and -(-size // rows) * rows * 8 > 9 * size:
        rows //= 2
    return rows


def write_tokens(tokens: int) -> int:
    return 1 if tokens < 1024 else 8


def write(block: int) -> Tuning:
    return Tuning(1 if block == 1 else 4, 1)


def _find(operation: str, capability: int | None, head_size: int, dtype: str, cache_dtype: str) -> dict[str, Any]:
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
    return json.loads(PATH.read_text())
