"""Memory accesses of each Triton kernel's programs, recorded in Triton's interpreter, against the necessary ones.

A kernel is one line of CASES. Addresses do not depend on values, so float16, which the interpreter supports, replaces
bfloat16.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import Choice, api, tuning

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl

from pallas_kernels.triton_bridge import call
from pallas_kernels.tuning import Tuning
from tests.gpu import traces
from tests.gpu.measured_steps import pieces
from tests.gpu.traces import SECTOR, Launch

TRITON = Choice("triton", 90)
Heads = tuple[int, int, int]
LLAMA, QWEN = (8, 2, 128), (14, 2, 64)  # query heads, key-value heads, head size: 8B on one of four devices, 0.5B
BLOCK, TILE = 16, 32
MOST = 1.1  # bytes of sectors over bytes that must be moved


@dataclass(frozen=True)
class Traced:
    """A call, and the bytes that it must move."""

    run: Callable[[], Any]
    needed: int
    exchanged: frozenset[str] = frozenset()  # arrays that programs pass to others by atomic operations

    def record(self, seed: int | None = None) -> tuple[list[Launch], list[np.ndarray]]:
        with traces.recorded(seed) as launches:
            results = [np.asarray(one) for one in jax.tree.leaves(self.run())]
        return launches, results


def numbers(*shape: int, dtype: str = "float16") -> jax.Array:
    """Make numbers, nearly all distinct; 8-bit integers of all sizes."""
    drawn = np.random.default_rng(0).standard_normal(shape)
    return jnp.asarray((drawn * 40 if dtype == "int8" else drawn).astype(dtype))


def ints(*values: Any) -> jax.Array:
    return jnp.asarray(np.concatenate([np.atleast_1d(one) for one in values]), jnp.int32)


def paged(lengths: np.ndarray, most: int) -> tuple[np.ndarray, int]:
    """Return block tables of sequences in scattered blocks, and the number of blocks."""
    wanted = [-(-int(length) // BLOCK) for length in lengths]
    free = np.random.default_rng(1).permutation(sum(wanted))
    tables = np.full((len(lengths), most), sum(wanted))  # after a sequence: an unused block
    for row, blocks in enumerate(wanted):
        tables[row, :blocks], free = free[:blocks], free[blocks:]
    return tables, sum(wanted) + 1


def cache(blocks: int, kv_heads: int, size: int, dtype: str) -> tuple[jax.Array, dict[str, Any], int]:
    """Make keys, used also as values, with scales if their type has them; return also the bytes of a token's."""
    keys = numbers(blocks, kv_heads, BLOCK, size, dtype=dtype)
    scales = jnp.abs(numbers(blocks, kv_heads, BLOCK, dtype="float32")) if dtype in api.SCALED else None
    num_bytes = 2 * kv_heads * (size * keys.dtype.itemsize + (0 if scales is None else 4))
    return keys, {"k_scales": scales, "v_scales": scales, "scale": size**-0.5}, num_bytes


def decode(heads: Heads, lengths: list[int], dtype: str = "float16", window: int | None = None) -> Traced:
    """Keys and values of each row once, queries for each piece of a row, results; parts are written and read.

    Each program reads the four numbers of its piece.
    """
    num_heads, kv_heads, size = heads
    tables, blocks = paged(np.asarray(lengths), 64)
    keys, own, token = cache(blocks, kv_heads, size, dtype)
    q = numbers(len(lengths), num_heads, size)
    chosen = tuning.of_decode(90, len(lengths), kv_heads, size, "float16", dtype, 64 * BLOCK)
    programs = min(
        len(lengths) + chosen.programs,
        len(lengths) * -(-(window or 64 * BLOCK) // chosen.least_keys),
    )
    needed = q.nbytes + programs * kv_heads * 4 * SECTOR
    for row in pieces(lengths, chosen, window):
        needed += sum(row) * token + len(row) * num_heads * 2 * size
        needed += len(row) * num_heads * 2 * 4 * (size + 2) * (len(row) > 1)
    arrays = (q, keys, keys + 0, jnp.asarray(tables), ints(lengths))
    run = partial(pallas_kernels.paged_decode, *arrays, **own, window=window, implementation=TRITON)
    return Traced(run, needed)


def prefill(heads: Heads, prompts: list[tuple[int, int]], dtype: str = "float16") -> Traced:
    """Keys up to the last query of each block of a tile's rows; `prompts` are (queries, keys before them)."""
    num_heads, kv_heads, size = heads
    tables, blocks = paged(np.asarray([sum(one) for one in prompts]), 24)
    keys, own, token = cache(blocks, kv_heads, size, dtype)
    q = numbers(sum(new for new, _ in prompts), num_heads, size)
    shared = num_heads // kv_heads
    rows = tuning.of_prefill(90, TILE * shared, size, "float16", dtype).rows
    tiles, began, needed = [], 0, 2 * q.nbytes
    for row, (new, before) in enumerate(prompts):
        for first in range(0, new, TILE):
            count = min(TILE, new - first)
            tiles.append((row, began + first, count, before + first))
            ends = (min(count, (at + rows - 1) // shared + 1) for at in range(0, count * shared, rows))
            needed += sum(before + first + end for end in ends) * token
        began += new
    owners, *places = np.asarray(tiles).T
    arrays = (q, keys, keys + 0, jnp.asarray(tables)[owners], *map(ints, places))
    run = partial(pallas_kernels.paged_prefill, *arrays, tile=TILE, **own, implementation=TRITON)
    return Traced(run, needed)


def write(heads: Heads, tokens: int, dtype: str = "float16", is_interleaved: bool = False) -> Traced:
    """Each number once, and the angles for each rotated head; pairs of neighbours are read twice, the second time
    cached.

    A program reads its token's destination: two sectors for each head of keys and values.
    """
    num_heads, kv_heads, size = heads
    keys, own, token = cache(tokens, kv_heads, size, dtype)
    qkv = numbers(tokens, num_heads + 2 * kv_heads, size)
    turn = numbers(tokens, size // 2, dtype="float32")
    rotated = tokens * (num_heads + kv_heads)
    needed = qkv.nbytes * (1 + is_interleaved) - is_interleaved * tokens * kv_heads * size * 2
    needed += tokens * (num_heads * size * 2 + token) + 2 * rotated * 4 * (size // 2)
    programs = -(-tokens // tuning.write_tokens(tokens)) * 2 * kv_heads
    needed += programs * SECTOR * 2 + (tokens * 2 * kv_heads * (SECTOR - 4) if dtype in api.SCALED else 0)
    options = {"turn": (turn, turn + 0), "is_interleaved": is_interleaved}
    options |= {name: own[name] for name in ("k_scales", "v_scales")}
    places = ints(np.random.default_rng(2).permutation(tokens)), ints(np.arange(tokens) % BLOCK)
    run = partial(pallas_kernels.write_kv, qkv, keys, keys + 0, *places, **options, implementation=TRITON)
    return Traced(run, needed)


def linear(tokens: int, rows: int, columns: int, kind: Any, groups: int) -> Traced:
    """A weight once for each block of tokens, tokens once for each block of rows, parts of sums once."""
    packed = kind in ("int4", "float4")
    weight = numbers(rows, columns // (1 + packed), dtype="int8")
    weight = jnp.asarray(np.asarray(weight).view({"int8": "int8", "float8": "float8_e4m3fn"}.get(kind, "uint8")))
    x, scales = numbers(tokens, columns), numbers(groups, rows, dtype="float32")
    chosen = tuning.of_linear(90, tokens, rows, columns, kind, "float16")
    blocks, turns = -(-rows // chosen.rows), -(-tokens // chosen.tokens)
    needed = (weight.nbytes + scales.nbytes) * turns + x.nbytes * blocks + tokens * rows * 4 * chosen.splits
    run = partial(pallas_kernels.linear, x, weight, scales, kind=kind, implementation=TRITON)
    return Traced(run, needed)


def fused(tokens: int, rows: int, columns: int, activation: Any = None) -> Traced:
    """A weight once for each block of tokens; tokens and the norm's gain once for each program; residual and result."""
    weight = numbers(rows * (1 if activation is None else 2), columns)
    x, gain, residual = numbers(tokens, columns), numbers(columns), numbers(tokens, rows)
    chosen = tuning.of_fused_linear(90, tokens, rows, columns, activation is not None, True)
    blocks, turns = -(-rows // chosen.rows), -(-tokens // chosen.tokens)
    needed = weight.nbytes * turns + x.nbytes * blocks
    needed += gain.nbytes * blocks * turns if tokens <= tuning.NORMED_INSIDE else 0
    needed += residual.nbytes * (2 if activation is None else 1)
    own = {"norm": pallas_kernels.Norm(gain, 1e-5), "activation": activation, "implementation": TRITON}
    own |= {"residual": residual} if activation is None else {}
    return Traced(partial(pallas_kernels.fused_linear, x, weight, **own), needed)


def sample(rows: int, size: int, visits: int | None = None, spread: float = 1.0, **filters: float) -> Traced:
    """Logits once, and once more per visit of all of them; with `spread` few tokens are likely and kept.

    With filters each row has two kinds of bins, which are cleared and read.
    """
    logits = numbers(rows, size, dtype="float32") * spread
    row = jnp.ones(rows, jnp.float32)
    arrays: list[Any] = [logits]
    if visits is not None:
        arrays += [row, jnp.asarray(np.arange(2 * rows).reshape(rows, 2), jnp.uint32), ints(np.arange(rows))]
    own = {name: (row * value).astype("int32" if name == "top_k" else "float32") for name, value in filters.items()}
    run = partial(pallas_kernels.sample, *arrays, **own, implementation=TRITON)
    return Traced(run, logits.nbytes * (1 + (visits or 0)) + (rows * tuning.BINS * 4 * 4 if filters else 0))


CASES: dict[str, Callable[[], Traced]] = {
    "decode, rows of one piece and of several": lambda: decode(LLAMA, [0, 40, 64, 530]),
    "decode, 7 heads share keys": lambda: decode(QWEN, [40, 260]),
    "decode, a window": lambda: decode(LLAMA, [48, 300], window=128),
    "decode, scales": lambda: decode(LLAMA, [70, 300], "int8"),
    "prefill, tiles of two prompts": lambda: prefill(LLAMA, [(40, 0), (32, 64)]),
    "prefill, scales": lambda: prefill(QWEN, [(35, 16)], "int8"),
    "write": lambda: write(LLAMA, 3),
    "write, neighbours": lambda: write(LLAMA, 2, is_interleaved=True),
    "write, scales": lambda: write(LLAMA, 3, "int8"),
    "linear, int8": lambda: linear(16, 128, 1024, "int8", 1),
    "linear, float8, two blocks of tokens": lambda: linear(144, 128, 256, "float8", 1),
    "linear, int4 by groups": lambda: linear(16, 128, 1024, "int4", 8),
    "fused, norm and residual": lambda: fused(16, 96, 512),
    "fused, norm and gated activation": lambda: fused(3, 64, 512, "silu"),
    "sample, greedy": lambda: sample(2, 20000),
    "sample, random": lambda: sample(2, 20000, 0),
    "sample, top_k and top_p": lambda: sample(2, 20000, 2, spread=16, top_p=0.9, top_k=10.0),
    "sample, top_p, few are likely": lambda: sample(1, 20000, 2, spread=16, top_p=0.9),
    # Nearly all are kept: their places are written and read, 2 bytes each, and their logits read again for the noise.
    "sample, top_p, all are likely": lambda: sample(1, 20000, 4, top_p=0.99),
}


FURTHER = {
    "decode, scales",
    "fused, norm and residual",
    "prefill, scales",
    "write, neighbours",
    "sample, random",
    "sample, top_p, all are likely",
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name in FURTHER)) for name in CASES]
)
def traced(request):
    case = CASES[request.param]()
    return case, *case.record()


def test_sectors_are_what_is_needed(traced):
    case, launches, _ = traced
    moved = sum((launch.moved for launch in launches), start=Counter())
    print(f"{moved.total() / case.needed:.3f} of what is needed: {dict(moved)}")
    assert 1 <= moved.total() / case.needed <= MOST, dict(moved)


def test_programs_touch_no_others_numbers_and_nothing_outside(traced):
    case, launches, _ = traced
    assert not [one for launch in launches for one in launch.violations(case.exchanged)]


def test_programs_run_in_any_order(traced):
    case, launches, results = traced
    shuffled, others = case.record(seed=0)
    assert [launch.programs for launch in shuffled] == [launch.programs for launch in launches]
    for one, other in zip(results, others, strict=True):
        assert one.tobytes() == other.tobytes()


def test_costs_are_counted_with_the_division_of_the_kernel():
    lengths = [0, 40, 530]
    case = decode(LLAMA, lengths)
    attend, *_ = case.record()[0]
    chosen = tuning.of_decode(90, len(lengths), 2, 128, "float16", "float16", 64 * BLOCK)
    own = [keys for row in pieces(lengths, chosen) for keys in row if keys]
    expected = [2 * 128 * keys for keys in own * LLAMA[1]]
    found = [num_bytes for (name, _), num_bytes in attend.own.items() if name == "k_cache"]
    assert sorted(found) == sorted(expected) and len(expected) == 2 * (2 + 17)


@triton.jit
def wrong(x, out, N: tl.constexpr, BN: tl.constexpr, MISTAKE: tl.constexpr):
    """Add 1 to N numbers, BN per program, with a mistake that results need not show; grid (pieces)."""
    piece = tl.program_id(0)
    at = piece * BN + tl.arange(0, BN)
    if MISTAKE == "strides":
        at = tl.arange(0, BN) * tl.num_programs(0) + piece
    value = tl.load(x + at, mask=at < N + (MISTAKE == "reads outside"), other=0.0) + 1
    if MISTAKE == "writes one number":  # the same value, at least
        tl.store(out, 1.0)
    if MISTAKE == "depends on the order":  # on whether the previous program has written
        value += tl.load(out + at - BN, mask=(piece > 0) & (at < N), other=0.0) >= 1
    tl.store(out + at, value, mask=at < N + (MISTAKE == "writes outside"))


@pytest.mark.parametrize(
    ("mistake", "seen"),
    {
        None: "",
        "reads outside": "program (3, 0, 0) does a load outside of x of 1000 bytes: at byte 1000, and 0 more",
        "writes outside": "program (3, 0, 0) does a store outside of out of 1000 bytes: at byte 1000, and 0 more",
        "writes one number": "two programs write one number of out",
        "depends on the order": "a program reads what another writes to out",
        "strides": "",
    }.items(),
)
def test_a_planted_mistake_is_seen(mistake, seen):
    x = jnp.zeros(250, jnp.float32)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    run = partial(call, wrong, (x,), [out], (4,), Tuning(1, 1), 90, N=250, BN=64, MISTAKE=mistake)
    case = Traced(run, 2 * x.nbytes)
    (launch,), (result,) = case.record()
    assert launch.violations() == [f"wrong: {seen}"] * bool(seen)
    assert launch.violations(frozenset({"out"})) == [f"wrong: {seen}"] * bool(seen), "there are no atomic operations"
    assert (launch.moved.total() > MOST * case.needed) == (mistake in ("strides", "depends on the order"))
    _, (other,) = case.record(seed=0)
    assert (other.tobytes() == result.tobytes()) == (mistake != "depends on the order")


@triton.jit
def last_sums(x, parts, counter, out, BN: tl.constexpr):
    """Sum BN numbers per program; the last program to finish adds the sums in order; grid (pieces)."""
    piece = tl.program_id(0)
    tl.store(parts + piece, tl.sum(tl.load(x + piece * BN + tl.arange(0, BN)), 0))
    if tl.atomic_add(counter, 1) == 3:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, 4)), 0))


def test_what_is_passed_on_under_atomic_operations_is_allowed_where_it_is_named():
    x = numbers(64, dtype="float32")
    kinds = ((1,), "float32"), ((4,), "float32"), ((1,), "int32")
    outputs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]
    arrays = (x, jnp.zeros(4), jnp.zeros(1, jnp.int32))
    aliases = {1: 1, 2: 2}
    run = partial(call, last_sums, arrays, outputs, (4,), Tuning(1, 1), 90, aliases=aliases, BN=16)
    case = Traced(run, x.nbytes)
    (launch,), results = case.record()
    assert launch.violations() == ["last_sums: a program reads what another writes to parts"]
    assert not launch.violations(frozenset({"parts"})) and launch.atomics == {"counter": 4}
    np.testing.assert_array_equal(case.record(seed=0)[1][0], results[0])
