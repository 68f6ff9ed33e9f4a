"""Paged attention and the cache write against a naive float64 loop, for all implementations and shapes.

Every cache starts as NaN and only the sequences' places are filled, so reads of other places show.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import Site
from pallas_kernels.api import SCALED
from pallas_kernels.attention.xla_lanes import deal
from pallas_kernels.native import build

NATIVE = pytest.param("native", marks=pytest.mark.skipif(bool(build.refusal()), reason=str(build.refusal())))
IMPLEMENTATIONS = ("xla", NATIVE)
OF_DECODE = (*IMPLEMENTATIONS, "xla_lanes")


@dataclass(frozen=True)
class Case:
    block_tokens: int
    head_size: int
    kv_heads: int
    group: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    value_size: int | None = None  # if values are the beginning of their keys; None: separate values

    @property
    def options(self) -> dict:
        options = {"scale": self.head_size**-0.5, "window": self.window, "softcap": self.softcap}
        return options | {"value_size": self.value_size}


CASES = [
    Case(1, 16, 2, 1),
    Case(2, 16, 1, 4, window=5),
    Case(16, 16, 2, 4, softcap=2.0),
    Case(16, 64, 2, 7),
    Case(16, 128, 1, 4, window=17, has_sinks=True),
    Case(64, 64, 1, 1, has_sinks=True),
    Case(64, 16, 3, 7, window=100, softcap=1.0, has_sinks=True),
    Case(16, 40, 1, 6, value_size=24),
    Case(4, 24, 2, 3, window=9, has_sinks=True, value_size=24),
    Case(8, 64, 1, 16),
    Case(32, 96, 2, 3, window=33),
    Case(128, 256, 1, 2, softcap=3.0),
    Case(4, 24, 1, 5, value_size=16),
    Case(16, 96, 1, 20, value_size=64),
    Case(16, 576, 1, 4, value_size=512),
]
TIERS = ([], [pytest.mark.slow], [pytest.mark.ci], [pytest.mark.slow])
EACH = [pytest.param(case, marks=TIERS[number % 4], id=str(case)) for number, case in enumerate(CASES)]


class Pool:
    """Blocks of a cache, NaN where nothing was stored; sequences are written token by token."""

    def __init__(self, case: Case, num_blocks: int, seed: int = 0) -> None:
        self.case, self.rng = case, np.random.default_rng(seed)
        shape = (num_blocks, case.kv_heads, case.block_tokens, case.head_size)
        self.k, self.v = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        self.free = self.rng.permutation(num_blocks).tolist()

    def add(self, length: int, shared: list[int] | None = None) -> list[int]:
        """Store random keys and values for a sequence that starts with full `shared` blocks; return its blocks."""
        size = self.case.block_tokens
        blocks = list(shared or [])
        for place in range(len(blocks) * size, length):
            if place % size == 0:
                blocks.append(self.free.pop())
            token = self.rng.standard_normal((2, self.case.kv_heads, self.case.head_size))
            self.k[blocks[-1], :, place % size], self.v[blocks[-1], :, place % size] = token
        return blocks

    def tables(self, sequences: list[list[int]], width: int) -> np.ndarray:
        """Return block tables, [rows, width]; entries after a sequence are other blocks, poisoned or foreign."""
        tables = self.rng.integers(0, len(self.k), (len(sequences), width))
        for row, blocks in zip(tables, sequences, strict=True):
            row[: len(blocks)] = blocks
        return tables.astype(np.int32)

    def queries(self, count: int) -> np.ndarray:
        heads = self.case.kv_heads * self.case.group
        return self.rng.standard_normal((count, heads, self.case.head_size)).astype(np.float32)

    @property
    def caches(self) -> tuple[np.ndarray, np.ndarray | None]:
        return self.k, self.v if self.case.value_size is None else None

    def sinks(self) -> np.ndarray | None:
        if not self.case.has_sinks:
            return None
        return self.rng.standard_normal(self.case.kv_heads * self.case.group).astype(np.float32)

    def attend(
        self,
        q: np.ndarray,
        blocks: list[int],
        place: int,
        sinks: np.ndarray | None,
        bias: np.ndarray | None = None,
        last_seen: int | None = None,
    ) -> np.ndarray:
        """Attend with one token's heads [H, C] at a place, head by head and key by key, in float64."""
        case, end = self.case, (place if last_seen is None else last_seen) + 1
        first = 0 if case.window is None else max(0, place - case.window + 1)
        values_in = self.v if case.value_size is None else self.k
        out = np.zeros((len(q), case.value_size or case.head_size))
        for head, query in enumerate(q.astype(np.float64)):
            stored = [
                cache[blocks[p // case.block_tokens], head // case.group, p % case.block_tokens]
                for cache in (self.k, values_in)
                for p in range(first, end)
            ]
            keys, values = np.asarray(stored, np.float64).reshape(2, end - first, case.head_size)
            scores = keys @ query * case.head_size**-0.5
            if case.softcap is not None:
                scores = case.softcap * np.tanh(scores / case.softcap)
            if bias is not None:
                scores += [bias[head, min(place - p, bias.shape[1] - 1)] for p in range(first, place + 1)]
            weights = np.exp(scores)
            total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[head]))
            out[head] = weights @ values[:, : case.value_size] / total
        return out

    def decode(self, q: np.ndarray, sequences: list[list[int]], lengths: list[int], sinks: Any) -> np.ndarray:
        """Attend with the last token of each sequence; zeros for empty ones."""
        none = np.zeros((q.shape[1], self.case.value_size or self.case.head_size))
        rows = zip(q, sequences, lengths, strict=True)
        return np.array([self.attend(row, blocks, n - 1, sinks) if n else none for row, blocks, n in rows])


@pytest.mark.parametrize("implementation", OF_DECODE)
@pytest.mark.parametrize("case", EACH)
def test_decode_matches_the_naive_loop(case, implementation):
    size = case.block_tokens
    lengths = [0, 1, size, size + 1, max(2, size - 1), 150, 3 * size + 2]
    pool = Pool(case, num_blocks=600 // size + 12)
    sequences = [pool.add(length) for length in lengths[:-1]]
    sequences.append(pool.add(lengths[-1], shared=sequences[5][: min(2, 150 // size)]))
    lengths[-1] = max(lengths[-1], min(2, 150 // size) * size)
    tables = pool.tables(sequences, width=max(map(len, sequences)) + 3)
    q, sinks = pool.queries(len(lengths)), pool.sinks()

    decode = jax.jit(partial(pallas_kernels.paged_decode, **case.options, implementation=implementation))
    out = np.asarray(decode(q, *pool.caches, tables, np.asarray(lengths, np.int32), sinks=sinks))

    assert not out[0].any()
    np.testing.assert_allclose(out, pool.decode(q, sequences, lengths, sinks), rtol=0, atol=3e-6)


@pytest.mark.ci
@pytest.mark.parametrize("case", EACH)
def test_many_rows_take_turns_in_lanes(case):
    """Cover lanes that end at different times: rows without tokens, of one and of several chunks of keys."""
    pool = Pool(case, num_blocks=37 * (200 // case.block_tokens + 1))
    lengths = [0, 1, 200, 64, 65, *pool.rng.integers(0, 140, 32).tolist()]
    sequences = [pool.add(length) for length in lengths]
    tables = pool.tables(sequences, width=max(map(len, sequences)) + 1)
    q, sinks = pool.queries(len(lengths)), pool.sinks()
    decode = jax.jit(partial(pallas_kernels.paged_decode, **case.options, implementation="xla_lanes"))
    out = np.asarray(decode(q, *pool.caches, tables, np.asarray(lengths, np.int32), sinks=sinks))
    np.testing.assert_allclose(out, pool.decode(q, sequences, lengths, sinks), rtol=0, atol=3e-6)

    # A row's bits do not depend on its neighbours' lengths, which decide the lanes.
    short = np.where(np.arange(len(lengths)) < 5, lengths, np.minimum(lengths, 3)).astype(np.int32)
    again = np.asarray(decode(q, *pool.caches, tables, short, sinks=sinks))
    np.testing.assert_array_equal(again[:5], out[:5])


def test_the_lanes_end_at_about_the_same_time():
    turns = np.random.default_rng(0).integers(0, 40, 61)
    _, ends = map(np.asarray, deal(jnp.asarray(turns)))
    assert ends[-1].sum() == turns.sum() and ends[-1].max() <= 1.1 * turns.sum() / ends.shape[1]


@pytest.mark.parametrize("rows", [17, 24, 32, 48, 61])
def test_every_row_is_dealt_once(rows):
    """Run compiled, as in a step: XLA once overwrote rows before reading them."""
    turns = np.random.default_rng(0).integers(0, 40, rows).astype(np.int32)
    order, ends = map(np.asarray, jax.jit(deal)(turns))
    assert sorted(order.ravel().tolist()) == [*range(rows), *[rows] * (-rows % 16)]
    np.testing.assert_array_equal(np.diff(ends, axis=0, prepend=0), np.append(turns, 0)[order])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", EACH)
def test_ragged_prefill_matches_the_naive_loop(case, implementation):
    tile, gap = 8, 3  # tokens between the sequences
    chunks = [(0, 1), (0, 21), (150, 13), (case.block_tokens, 8), (5, 2 * case.block_tokens % 30 + 1)]  # cached, new
    pool = Pool(case, num_blocks=700 // case.block_tokens + 14, seed=1)
    sequences = [pool.add(cached + new) for cached, new in chunks]
    q = pool.queries(sum(new + gap for _, new in chunks))
    sinks = pool.sinks()

    expected = np.zeros((*q.shape[:2], case.value_size or case.head_size))
    tiles, owners, start = [(2, 0, 7)], [sequences[0]], gap  # begins with an empty tile
    for blocks, (cached, new) in zip(sequences, chunks, strict=True):
        for token in range(new):
            expected[start + token] = pool.attend(q[start + token], blocks, cached + token, sinks)
        for begin in range(0, new, tile):
            tiles.append((start + begin, min(tile, new - begin), cached + begin))
            owners.append(blocks)
        start += new + gap
    order = pool.rng.permutation(len(tiles))
    tables = pool.tables([owners[one] for one in order], width=max(map(len, sequences)) + 2)
    starts, lengths, places = np.asarray(tiles, np.int32)[order].T

    prefill = jax.jit(partial(pallas_kernels.paged_prefill, tile=tile, **case.options, implementation=implementation))
    out = np.asarray(prefill(q[: start - gap], *pool.caches, tables, starts, lengths, places, sinks=sinks))
    np.testing.assert_allclose(out, expected[: start - gap], rtol=0, atol=3e-6)


@pytest.mark.parametrize("window", [30, *(pytest.param(each, marks=pytest.mark.ci) for each in (None, 5))])
def test_queries_of_images_see_keys_after_them(window: int | None, implementation: Any = "xla") -> None:
    """Test images that begin and end inside tiles and blocks, windows shorter than an image, and unwritten keys."""
    case, tile, start, cached = Case(4, 16, 2, 2, window=window), 8, 3, 17
    pool = Pool(case, num_blocks=80)
    sequences = [pool.add(60), pool.add(19)]
    new = 43 + 2  # of both sequences
    last_seen = np.arange(start + new) - start + cached
    last_seen[start + 43 :] = 17, 18
    for first, end in ((20, 37), (40, 41), (41, 57)):
        last_seen[start + first - cached : start + end - cached] = end - 1
    q, owners = pool.queries(start + new), [0] * 6 + [1]
    starts = np.asarray([start + tile * number for number in range(6)] + [start + 43], np.int32)
    lengths, places = np.asarray([8] * 5 + [3, 2], np.int32), np.asarray([*range(17, 60, 8), 17], np.int32)
    arguments = q, *pool.caches, pool.tables([sequences[one] for one in owners], 20), starts, lengths, places
    prefill, seen = partial(pallas_kernels.paged_prefill, tile=tile, **case.options), jnp.asarray(last_seen, jnp.int32)
    out = np.asarray(jax.jit(partial(prefill, implementation=implementation))(*arguments, last_seen=seen))
    for token in range(new):
        owner, place = (0, cached + token) if token < 43 else (1, token - 43 + 17)
        due = pool.attend(q[start + token], sequences[owner], place, None, last_seen=int(last_seen[start + token]))
        np.testing.assert_allclose(out[start + token], due, rtol=0, atol=3e-6)
    with pytest.raises(ValueError, match="see no keys after them"):
        jax.jit(partial(prefill, implementation="native"))(*arguments, last_seen=seen)


def test_a_bias_by_distance_is_added_and_refused_by_kernels_without_it():
    case, tile = Case(4, 16, 3, 1), 8
    pool = Pool(case, num_blocks=40)
    lengths = [1, 70, 0, 9]
    sequences = [pool.add(length) for length in lengths]
    bias = pool.rng.standard_normal((3, 12)).astype(np.float32)
    q, tables, counts = pool.queries(4), pool.tables(sequences, 20), np.asarray(lengths, np.int32)
    arguments = q, *pool.caches, tables, counts
    decode, prefill = (
        jax.jit(partial(operation, **case.options, **further, implementation="xla"))
        for operation, further in ((pallas_kernels.paged_decode, {}), (pallas_kernels.paged_prefill, {"tile": tile}))
    )
    out = decode(*arguments, bias=bias)
    for row in (0, 1, 3):
        expected = pool.attend(q[row], sequences[row], lengths[row] - 1, None, bias)
        np.testing.assert_allclose(out[row], expected, rtol=0, atol=3e-6)
    tiles = np.asarray([0], np.int32), np.asarray([tile], np.int32), np.asarray([60], np.int32)
    q = pool.queries(tile)
    out = prefill(q, *pool.caches, tables[1:2], *tiles, bias=bias)
    for token in range(tile):
        expected = pool.attend(q[token], sequences[1], 60 + token, None, bias)
        np.testing.assert_allclose(out[token], expected, rtol=0, atol=3e-6)
    with pytest.raises(ValueError, match="adds no bias"):
        jax.jit(partial(pallas_kernels.paged_decode, **case.options, implementation="xla_lanes"))(*arguments, bias=bias)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_caches_are_accumulated_in_float32(implementation):
    case = Case(16, 64, 2, 4)
    pool = Pool(case, num_blocks=70)
    blocks = pool.add(1000)
    pool.k, pool.v = (cache.astype(ml_dtypes.bfloat16) for cache in (pool.k, pool.v))
    q = pool.queries(1).astype(ml_dtypes.bfloat16)
    decode = jax.jit(partial(pallas_kernels.paged_decode, **case.options, implementation=implementation))
    out = decode(q, pool.k, pool.v, pool.tables([blocks], 63), np.asarray([1000], np.int32))
    assert out.dtype == jnp.bfloat16
    expected = pool.attend(q[0], blocks, 999, None)
    # One rounding of each weight and one of the result, relative to values of about 1/30: 2**-8 of that.
    np.testing.assert_allclose(np.asarray(out[0], np.float64), expected, rtol=0, atol=5e-4)


# XLA:CPU of jax 0.10 can neither gather nor scatter bfloat16: it converts the whole pool to float32 and back.
_BFLOAT16 = pytest.param(
    jnp.bfloat16, marks=pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10 converts the pool")
)


@pytest.mark.parametrize("dtype", [jnp.float32, _BFLOAT16])
def test_decode_touches_only_the_blocks_of_its_sequence(dtype):
    """Check that temporary memory is small: converting or copying the pool would need its size."""
    shape = (4096, 2, 16, 64)
    pool = jax.ShapeDtypeStruct(shape, dtype)
    arguments = (jax.ShapeDtypeStruct((1, 8, 64), dtype), pool, pool)
    arguments += (jax.ShapeDtypeStruct((1, 16), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32))
    decode = jax.jit(partial(pallas_kernels.paged_decode, scale=1.0, implementation="xla"))
    memory = decode.lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < np.prod(shape) / 50


def test_unnamed_implementation_is_the_platforms_best():
    case = CASES[0]
    pool = Pool(case, num_blocks=8)
    host = (pool.queries(1), pool.k, pool.v, pool.tables([pool.add(3)], 4), np.asarray([3], np.int32))
    arguments, options = tuple(map(jnp.asarray, host)), case.options
    best = "xla_lanes" if build.refusal() else "native"
    expected = pallas_kernels.paged_decode(*arguments, implementation=best, **options)
    np.testing.assert_array_equal(pallas_kernels.paged_decode(*arguments, **options), expected)
    assert pallas_kernels.resolve("paged_decode", Site("cpu")).name == best
    assert pallas_kernels.resolve("paged_prefill", Site("gpu", 70)).name == "xla"
    with pytest.raises(ValueError, match="paged_decode, paged_prefill"):
        pallas_kernels.resolve("paged_encode", Site("cpu"))
    with pytest.raises(ValueError, match="no implementation 'cuda'; it has xla, xla_lanes, pallas"):
        pallas_kernels.paged_decode(*arguments, implementation="cuda", **options)
    with pytest.raises(ValueError, match=r"paged_decode=triton: (the package triton|Triton kernels run on NVIDIA)"):
        pallas_kernels.paged_decode(*arguments, implementation="triton", **options)
    with pytest.raises(ValueError, match="queries of 3 heads of 16 do not fit a cache of 2 heads of 16"):
        pallas_kernels.paged_decode(jnp.zeros((1, 3, 16)), *arguments[1:], **options)
    with pytest.raises(ValueError, match="either v_cache or value_size"):
        pallas_kernels.paged_decode(*arguments, **(options | {"value_size": 8}))
    with pytest.raises(ValueError, match="keys of 16 do not begin with values of 17"):
        pallas_kernels.paged_decode(*arguments[:2], None, *arguments[3:], **(options | {"value_size": 17}))


def test_write_kv_stores_each_token_in_its_place_and_drops_padding():
    rng = np.random.default_rng(3)
    k_cache, v_cache = rng.standard_normal((2, 5, 3, 4, 8)).astype(ml_dtypes.bfloat16)
    qkv = rng.standard_normal((6, 8, 8)).astype(np.float32)  # heads: 2 of queries, 3 of keys, 3 of values
    blocks, offsets = np.asarray([4, 0, 4, 5, 2, 6], np.int32), np.asarray([3, 0, 1, 1, 2, 0], np.int32)
    arrays = tuple(map(jnp.asarray, (qkv, k_cache, v_cache, blocks, offsets)))
    stored = pallas_kernels.write_kv(*arrays)
    np.testing.assert_array_equal(stored.q, qkv[:, :2])
    for cache, new in ((k_cache, qkv[:, 2:5]), (v_cache, qkv[:, 5:])):
        for token in (0, 1, 2, 4):
            cache[blocks[token], :, offsets[token]] = new[token]
    np.testing.assert_array_equal(np.asarray(stored.k_cache), k_cache)
    np.testing.assert_array_equal(np.asarray(stored.v_cache), v_cache)
    alone = pallas_kernels.write_kv(arrays[0][:, :5], stored.k_cache, None, *arrays[3:])
    np.testing.assert_array_equal(np.asarray(alone.k_cache), k_cache)
    assert alone.v_cache is None
    with pytest.raises(ValueError, match="do not fit caches"):
        pallas_kernels.write_kv(arrays[0][:, :5], *arrays[1:])
    with pytest.raises(ValueError, match="5 pairs do not fit heads of 8"):
        pallas_kernels.write_kv(*arrays, turn=(jnp.zeros((6, 5)), jnp.zeros((6, 5))))


WRITES = [  # tokens, query heads, key-value heads, head size, pairs, is_interleaved, has_values
    (1, 4, 2, 16, 8, False, True),
    (5, 7, 1, 64, 16, True, True),
    (3, 2, 2, 24, 12, False, True),
    (9, 4, 1, 40, 10, True, True),
    (6, 3, 1, 24, 0, False, False),
    (1030, 1, 1, 16, 4, False, True),
]


def check_write_beside_the_reference(
    write: tuple[int, int, int, int, int, bool, bool], dtype: str, implementation: str | pallas_kernels.Choice
) -> None:
    """Compare `write_kv` for one of `WRITES` in caches of `dtype` with plain JAX.

    Queries are float32, or of a 16-bit cache's type. The last of several tokens names a block out of bounds.
    """
    tokens, heads, kv_heads, size, pairs, is_interleaved, has_values = write
    rng = np.random.default_rng(0)
    num_blocks, block_tokens = 300, 4
    shape = (num_blocks, kv_heads, block_tokens, size)
    places = rng.permutation(num_blocks * block_tokens)[:tokens]
    blocks, offsets = (places // block_tokens).astype(np.int32), (places % block_tokens).astype(np.int32)
    if tokens > 1:
        blocks[-1] = num_blocks  # not stored
    k_cache, v_cache = jnp.asarray(rng.integers(-9, 9, (2, *shape))).astype(dtype)
    scales = jnp.asarray(rng.random((2, *shape[:3])), jnp.float32)
    own = dtype if dtype in ("float16", "bfloat16") else "float32"
    qkv = jnp.asarray(rng.standard_normal((tokens, heads + kv_heads * (1 + has_values), size)), own)
    angles = jnp.asarray(rng.standard_normal((tokens, pairs)) * 9, jnp.float32)
    options: dict[str, Any] = {"turn": (jnp.cos(angles), jnp.sin(angles)) if pairs else None}
    if dtype in SCALED:
        options |= {"k_scales": scales[0], "v_scales": scales[1] if has_values else None}
    arrays = (qkv, k_cache, v_cache if has_values else None, jnp.asarray(blocks), jnp.asarray(offsets))
    expected, got = (
        jax.jit(partial(pallas_kernels.write_kv, is_interleaved=is_interleaved, implementation=one))(*arrays, **options)
        for one in ("xla", implementation)
    )
    for name, one, other in zip(expected._fields, expected, got, strict=True):
        assert (one is None) == (other is None), name
        if one is None or other is None:
            continue
        assert one.dtype == other.dtype, name
        # Rounding may differ: an integer by 1, a small float by its last bit.
        is_wide = one.dtype == jnp.float32
        atol = 1.0 if one.dtype == jnp.int8 else 1e-6
        rtol = 0.0 if is_wide or one.dtype == jnp.int8 else float(jnp.finfo(one.dtype).eps)
        np.testing.assert_allclose(np.float32(other), np.float32(one), rtol=rtol, atol=atol, err_msg=name)
        if not is_wide:
            assert np.mean(np.asarray(one) != np.asarray(other)) < 0.01, name


@pytest.mark.parametrize("dtype", [jnp.float32, _BFLOAT16])
def test_write_kv_is_in_place_when_the_caches_are_donated(dtype):
    cache = jax.ShapeDtypeStruct((256, 2, 16, 64), dtype)
    new, place = jax.ShapeDtypeStruct((4, 6, 64), dtype), jax.ShapeDtypeStruct((4,), jnp.int32)
    write = jax.jit(pallas_kernels.write_kv, donate_argnums=(1, 2))
    memory = write.lower(new, cache, cache, place, place).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 2 * np.prod(cache.shape) * np.dtype(dtype).itemsize
    assert memory.temp_size_in_bytes < 64 * 1024


@pytest.mark.parametrize("float8", ["float8_e4m3fn", pytest.param("float8_e5m2", marks=pytest.mark.slow)])
def test_bytes_are_the_floats_that_they_hold(float8):
    """A cache of bytes gives the results of a cache of 8-bit floats, bit for bit, in every operation."""
    rng, shape = np.random.default_rng(0), (6, 2, 4, 16)
    qkv = jnp.asarray(rng.standard_normal((9, 8, 16)), jnp.float32)
    blocks, offsets = jnp.arange(9, dtype=jnp.int32) // 4, jnp.arange(9, dtype=jnp.int32) % 4
    tables, found = jnp.asarray([[0, 1, 2]], jnp.int32), []
    for dtype, named in ((float8, None), ("uint8", float8)):
        cache, scales = jnp.zeros(shape, dtype), jnp.zeros(shape[:3], jnp.float32)
        written = pallas_kernels.write_kv(
            qkv, cache, cache, blocks, offsets, k_scales=scales, v_scales=scales, float8=named
        )
        q, caches, own = written.q, written[1:3], dict(zip(("k_scales", "v_scales"), written[3:], strict=True))
        options = {"scale": 0.25, "float8": named, **own}
        results = [np.asarray(one).view(np.uint8) for one in written]
        for implementation in ("xla", "xla_lanes"):
            lengths = jnp.full(17 if implementation == "xla_lanes" else 1, 9)  # more rows than lanes
            rows, own_tables = jnp.resize(q, (len(lengths), *q.shape[1:])), jnp.resize(tables, (len(lengths), 3))
            decode = partial(pallas_kernels.paged_decode, implementation=implementation, **options)
            results.append(np.asarray(decode(rows, *caches, own_tables, lengths)))
        prefill = partial(pallas_kernels.paged_prefill, tile=16, implementation="xla", **options)
        places = (jnp.asarray([number], jnp.int32) for number in (0, 9, 0))
        results.append(np.asarray(prefill(q, *caches, tables, *places)))
        found.append(results)
    for floats, bits in zip(*found, strict=True):
        assert np.any(floats)
        np.testing.assert_array_equal(floats, bits)
    with pytest.raises(ValueError, match="float8 is one of float8_e4m3fn, float8_e5m2 where the cache holds bytes"):
        pallas_kernels.write_kv(qkv, cache, cache, blocks, offsets, k_scales=scales, v_scales=scales)
