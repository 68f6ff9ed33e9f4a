"""Every implementation of every operation, in every type, against the float32 reference on the same rounded inputs.

Places where nothing was stored are NaN, so reading them shows. Vectors of one head are compared by the length of their
difference, so that an error in a single row is not averaged away.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import Choice
from pallas_kernels.api import SCALED
from tests.gpu_check.check import Check
from tests.gpu_check.sites import choices, full_precision, is_interpreted, site_of

TILE = 32
SHARE = 0.9  # of the device's memory, to allow for fragmentation
WIDEST = 4096  # of the tokens of a product
COPIES = 2.5  # times the experts' weights in float32: these, their rounded copies and a kernel's workspace
TOLERANCES = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}  # relative to a vector's length
TYPES = (  # of queries, of the cache
    *(("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"), ("bfloat16", "int8")),
    *(("bfloat16", "float8_e4m3fn"), ("float16", "int8")),
)
USUAL = ("triton", "xla")  # the implementations that an engine chooses on a GPU; compared before all others
EDGE_TYPES = (TYPES[0], TYPES[2], TYPES[3])
Distance = Callable[[Choice], float]  # of an implementation from the reference


class Shape(NamedTuple):
    """Heads, and further options of attention."""

    name: str
    heads: int
    kv_heads: int
    size: int
    block_tokens: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    value_size: int | None = None
    experts: tuple[int, int, int, int, bool] = (4, 2, 32, 24, True)  # E, n, D, F, has_bias

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of both attention operations."""
        scale = self.size**-0.5
        return {"scale": scale, "window": self.window, "softcap": self.softcap, "value_size": self.value_size}


EDGES = (
    Shape("blocks of 1", 2, 2, 16, 1),
    Shape("blocks of 2, window", 4, 1, 16, 2, window=5),
    Shape("softcap", 8, 2, 16, softcap=2.0),
    Shape("window, sinks", 4, 1, 128, window=17, has_sinks=True),
    Shape("blocks of 64, sinks", 1, 1, 64, 64, has_sinks=True),
    Shape("everything", 21, 3, 16, 64, window=100, softcap=1.0, has_sinks=True),
    Shape("heads of 40, latent", 6, 1, 40, value_size=24),
    Shape("heads of 80", 8, 8, 80),
    Shape("small latents", 20, 1, 96, 8, value_size=64),
)
MODELS = (
    Shape("Qwen2.5-0.5B", 14, 2, 64),
    Shape("Llama-3.1-8B", 32, 8, 128),
    Shape("Gemma-2-9B", 16, 8, 256, window=4096, softcap=50.0),
    Shape("gpt-oss", 64, 8, 64, window=128, has_sinks=True),
    Shape("DeepSeek-V2-Lite", 16, 1, 576, value_size=512),
    Shape("DeepSeek-V3", 128, 1, 576, value_size=512),
)
MIXTURES = (  # attention is not compared
    Shape("Qwen3-30B-A3B", 32, 4, 128, experts=(128, 8, 2048, 768, False)),
    Shape("gpt-oss-20b", 64, 8, 64, experts=(32, 4, 2880, 2880, True)),
)
ROUTED, DRY_ROUTED = (16, 300), (3, 20)  # tokens
DRY = (((EDGES[2],), (TYPES[2],)), ((EDGES[6],), (TYPES[5],)))
LENGTHS, DRY_LENGTHS = (0, 1, 16, 17, 150, 1030, 4100), (0, 1, 17, 90)  # the longest is divided among programs
CHUNKS, DRY_CHUNKS = ((0, 40), (100, 1), (7, 130), (1000, 33)), ((0, 5), (20, 40))  # positions and queries


def run(check: Check) -> None:
    refused: set[str] = set()
    memory = Memory((jax.devices()[0].memory_stats() or {}).get("bytes_limit"))
    compared = 0
    # Compiling takes most of the time, and runs in parallel; Triton's interpreter needs one thread.
    with full_precision(), ThreadPoolExecutor(1 if is_interpreted() else os.cpu_count()) as threads:
        futures = [
            (
                threads.submit(_bounded, memory, *one, others, check.is_dry),
                f"{one[0]}, {one[1].name}, {one[2]}, cache of {one[3]}" + ", others" * others,
            )
            for others in (False, True)
            for one in _cases(check.is_dry)
            if not others or set(pallas_kernels.implementations(one[0])) - set(USUAL)
        ]
        for future, what in futures:
            with check.guarded(what, is_wrong=True):
                try:
                    rows, reasons = future.result(max(check.left - 3, 0))
                except TimeoutError:
                    check.not_run(f"{what}, and all later cases: give it more minutes")
                    break
                refused |= reasons
                compared += 1
                for row in rows:
                    _note(check, row)
        for line in sorted(refused):
            check.skip(line)
        check.measure(cases_compared=compared, of=len(futures))
        for future, _ in futures:  # the pool waits for running cases
            future.cancel()


class Memory:
    """The device's memory: each case reserves its bound first, so that parallel cases never exceed the total."""

    def __init__(self, total: float | None) -> None:
        self._total = self._left = float("inf") if total is None else SHARE * total
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, size: float) -> Iterator[None]:
        """Wait until `size` bytes are free and reserve them; a larger size waits for all of the memory."""
        size = min(size, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= size)
            self._left -= size
        try:
            yield
        finally:
            with self._changed:
                self._left += size
                self._changed.notify_all()


def most_bytes(operation: str, shape: Shape) -> float:
    """Return the bound of a case's device memory."""
    if operation != "fused_experts":
        return 2 << 30
    count, _, width, inner, _ = shape.experts
    return COPIES * 4 * count * 3 * inner * width + (1 << 30)


def _bounded(memory: Memory, operation: str, shape: Shape, *given: Any) -> tuple[list[dict[str, Any]], set[str]]:
    with memory.taken(most_bytes(operation, shape)):
        return _compare(operation, shape, *given)


def _cases(is_dry: bool) -> Iterator[tuple[str, Shape, str, str]]:
    """Yield operation, shape and types, the most common first in case time runs out."""
    yield "sample", EDGES[2] if is_dry else MODELS[0], "float16", "float16"  # "sample" uses neither type
    for shape in EDGES[:1] if is_dry else MIXTURES:
        yield "fused_topk", shape, "float32", "float32"
        for dtype in ("float32",) if is_dry else ("bfloat16", "float16"):
            yield "fused_experts", shape, dtype, dtype
    for shapes, types in DRY if is_dry else ((MODELS, TYPES), (EDGES, EDGE_TYPES)):
        for dtype, cache_dtype in types:
            for shape in shapes:
                for operation in OPERATIONS:
                    if operation not in ("sample", "fused_topk", "fused_experts") and (
                        operation != "fused_linear" or dtype == cache_dtype
                    ):
                        yield operation, shape, dtype, cache_dtype


def _compare(
    operation: str, shape: Shape, dtype: str, cache_dtype: str, others: bool, is_dry: bool
) -> tuple[list[dict[str, Any]], set[str]]:
    """Run the implementations of `USUAL`, or the others; return their rows, and why others cannot run."""
    rows, reasons = [], set()
    distance: Distance | None = None
    site = site_of(
        dtype,
        cache_dtype,
        (shape.heads, shape.kv_heads, shape.size),
        value_size=shape.value_size,
        block_tokens=shape.block_tokens,
        has_softcap=shape.softcap is not None,
    )
    for name, chosen in choices(operation, site):
        if (name in USUAL) is others:
            continue
        if isinstance(chosen, str):
            reasons.add(f"{operation}={name}: {chosen}")
            continue
        row = {"operation": operation, "by": name, "dtype": dtype, "cache": cache_dtype, "shape": shape.name}
        try:
            distance = distance or OPERATIONS[operation](shape, dtype, cache_dtype, is_dry)
            rows.append(row | {"worst": distance(chosen)})
        except Exception as error:  # the others still run
            rows.append(row | {"error": f"{type(error).__name__}: {error!s:.300}"})
    return rows, reasons


def _note(check: Check, row: dict[str, Any]) -> None:
    what = "{operation}={by}, {shape}, {dtype}, cache of {cache}".format(**row)
    if "error" in row:
        check.fail(f"{what}: {row['error']}")
        return
    limit = TOLERANCES[row["dtype"]]
    check.measure(**row, limit=limit)
    if not row["worst"] <= limit:  # NaN is not
        check.fail(f"{what}: a vector is {row['worst']:.2g} of its length off, more than {limit:g}")


def _decode(shape: Shape, dtype: str, cache_dtype: str, is_dry: bool) -> Distance:
    pool = _Pool(shape, DRY_LENGTHS if is_dry else LENGTHS, dtype, cache_dtype)
    q = pool.normal((len(pool.lengths), shape.heads, shape.size), dtype)
    arrays = (pool.tables, jnp.asarray(pool.lengths, jnp.int32))
    return _against(partial(pallas_kernels.paged_decode, **shape.options), q, pool, arrays)


def _prefill(shape: Shape, dtype: str, cache_dtype: str, is_dry: bool) -> Distance:
    chunks = DRY_CHUNKS if is_dry else CHUNKS
    pool = _Pool(shape, [position + count for position, count in chunks], dtype, cache_dtype)
    tiles, first = [], 0
    for row, (position, count) in enumerate(chunks):
        for inside in range(0, count, TILE):
            tiles.append((row, first + inside, min(TILE, count - inside), position + inside))
        first += count + 3  # queries in no tile
    tiles.append((0, 0, 0, 0))  # padding
    rows, *places = np.asarray(tiles, np.int32).T
    q = pool.normal((first, shape.heads, shape.size), dtype)
    arrays = (pool.tables[rows], *map(jnp.asarray, places))
    return _against(partial(pallas_kernels.paged_prefill, tile=TILE, **shape.options), q, pool, arrays)


def _write(shape: Shape, dtype: str, cache_dtype: str, is_dry: bool) -> Distance:
    """Compare queries and stored values with the reference in the same type: both round alike, except halves."""
    pool = _Pool(shape, (40,), dtype, cache_dtype)
    tokens = 9 if is_dry else 1030
    num_blocks, size = tokens // shape.block_tokens + 3, shape.block_tokens
    places = pool.random.permutation(num_blocks * size)[:tokens]
    blocks, offsets = (places // size).astype(np.int32), (places % size).astype(np.int32)
    blocks[-1] = num_blocks  # not stored
    has_values = shape.value_size is None
    qkv = pool.normal((tokens, shape.heads + shape.kv_heads * (1 + has_values), shape.size), dtype)
    angles = pool.random.standard_normal((tokens, shape.size // 2)) * 9
    turn = (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
    turn = turn if has_values else None  # the model rotates only a part of a latent's key
    cache = jnp.zeros((num_blocks, shape.kv_heads, size, shape.size), cache_dtype)
    scales = jnp.ones(cache.shape[:3], jnp.float32) if cache_dtype in SCALED else None

    def write(implementation: str | Choice) -> Any:
        options = {"turn": turn, "k_scales": scales, "v_scales": scales if has_values else None}
        arrays = (qkv, cache, cache if has_values else None, jnp.asarray(blocks), jnp.asarray(offsets))
        run = jax.jit(partial(pallas_kernels.write_kv, **options, implementation=implementation))
        return run(*arrays)

    wanted = write("xla")

    def distance(chosen: Choice) -> float:
        found = write(chosen)
        worst = _distance(found.q, wanted.q)
        for one, other, one_scales, other_scales in (
            (found.k_cache, wanted.k_cache, found.k_scales, wanted.k_scales),
            (found.v_cache, wanted.v_cache, found.v_scales, wanted.v_scales),
        ):
            if one is not None:
                worst = max(worst, _distance(_whole(one, one_scales), _whole(other, other_scales)))
        return worst

    return distance


def _sample(shape: Shape, _dtype: str, _cache_dtype: str, is_dry: bool) -> Distance:
    """Choose tokens with all filters and without; the distance is the share of rows with another token.

    The last bits of an exponential or a logarithm may decide between two tokens, in far fewer rows than are allowed.
    """
    count, size = (8, 1000) if is_dry else (64, 151936)
    random = np.random.default_rng(0)
    logits = jnp.asarray(random.standard_normal((count, size)) * 4, jnp.float32)
    logits = logits.at[0].set(0.0).at[1, ::2].set(-jnp.inf)
    own = {
        "temperature": jnp.asarray(random.choice([0.0, 0.7, 1.0, 3.0], count), jnp.float32),
        "keys": jnp.asarray(random.integers(0, 2**32, (count, 2)), jnp.uint32),
        "positions": jnp.asarray(random.integers(0, 2**31 - 1, count), jnp.int32),
    }
    filters = {
        "top_k": jnp.asarray(random.choice([0, 1, 50], count), jnp.int32),
        "top_p": jnp.asarray(random.choice([0.3, 0.9, 1.0], count), jnp.float32),
        "min_p": jnp.asarray(random.choice([0.0, 0.05, 1.0], count), jnp.float32),
    }

    def choose(implementation: str | Choice) -> list[Any]:
        run = jax.jit(partial(pallas_kernels.sample, implementation=implementation))
        return [run(logits), run(logits, **own), run(logits, **own, **filters)]

    wanted = choose("xla")

    def distance(chosen: Choice) -> float:
        others = 0
        for (tokens, is_finite), (right, is_right) in zip(choose(chosen), wanted, strict=True):
            if not np.array_equal(is_finite, is_right):
                return float("inf")
            others += int(np.count_nonzero(np.asarray(tokens) != np.asarray(right)))
        return others / (3 * count) if others > 1 else 0.0

    return distance


def _fused(shape: Shape, dtype: str, _cache_dtype: str, is_dry: bool) -> Distance:
    """Do a layer's four products, with norms of both kinds, a bias, residuals and an activation."""
    random, width, tokens = np.random.default_rng(0), min(shape.heads * shape.size, WIDEST), 5 if is_dry else 33
    wide, qkv = 2 * width + 24, width + 2 * shape.kv_heads * shape.size

    def normal(*size: int) -> jax.Array:
        scale = size[1] ** -0.5 if len(size) == 2 and size[0] != tokens else 1.0
        return jnp.asarray(random.standard_normal(size, np.float32) * scale).astype(dtype)

    x, inner, gain = normal(tokens, width), normal(tokens, wide), normal(width)
    products = (
        ((x, normal(qkv, width)), {"bias": normal(qkv), "gain": gain}, {"is_plus_one": True}),
        ((x, normal(width, width)), {"residual": x}, {}),
        ((x, normal(2 * wide, width)), {"gain": gain}, {"activation": "silu"}),
        ((inner, normal(width, wide)), {"residual": x}, {}),
    )

    def multiply(implementation: str | Choice, is_exact: bool) -> list[jax.Array]:
        def one(arrays: Any, further: Any, is_plus_one: bool = False, activation: Any = None) -> jax.Array:
            gain, others = further.get("gain"), {name: own for name, own in further.items() if name != "gain"}
            norm = None if gain is None else pallas_kernels.Norm(gain, 1e-5, is_plus_one)
            options = {"norm": norm, "activation": activation, "implementation": implementation}
            return pallas_kernels.fused_linear(*arrays, **others, **options)

        run = jax.jit(one, static_argnames=("is_plus_one", "activation"))
        kind = jnp.float32 if is_exact else dtype
        return [
            run(*jax.tree.map(lambda own: own.astype(kind), (arrays, further)), **static)
            for arrays, further, static in products
        ]

    wanted = multiply("xla", True)
    return lambda chosen: max(map(_distance, multiply(chosen, False), wanted))


def _topk(shape: Shape, _dtype: str, _cache_dtype: str, _is_dry: bool) -> Distance:
    """Choose experts by scores that differ clearly; compare the weights, laid out over all experts."""
    count, per_token, *_ = shape.experts
    random = np.random.default_rng(0)
    scores = jnp.asarray(random.permuted(np.tile(np.arange(count) / 8, (300, 1)), axis=1), jnp.float32)
    own = {"per_token": per_token, "is_normalised": True, "scale": 1.5}

    def weights(implementation: str | Choice) -> np.ndarray:
        found = np.zeros(scores.shape, np.float32)
        chosen, gates = jax.jit(partial(pallas_kernels.fused_topk, **own, implementation=implementation))(scores)
        np.put_along_axis(found, np.asarray(chosen), np.asarray(gates), axis=1)
        return found

    wanted = weights("xla")
    return lambda chosen: _distance(jnp.asarray(weights(chosen)), jnp.asarray(wanted))


def _experts(shape: Shape, dtype: str, _cache_dtype: str, is_dry: bool) -> Distance:
    """Multiply few and many tokens, half of which choose the same experts; compare with float32 products."""
    count, per_token, width, inner, has_bias = shape.experts
    random = np.random.default_rng(0)

    def normal(*sizes: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(sizes, np.float32) * sizes[-1] ** -0.5).astype(dtype)

    weights = [normal(count, 2 * inner, width), normal(count, width, inner)]
    biases = [normal(count, 2 * inner), normal(count, width)] if has_bias else []
    own = {"clamp": 7.0 if has_bias else None}
    cases = []
    for tokens in DRY_ROUTED if is_dry else ROUTED:
        chosen = np.argsort(random.random((tokens, count)), axis=1)[:, :per_token].astype(np.int32)
        chosen[tokens // 2 :] = chosen[0]
        gates = jnp.asarray(random.random(chosen.shape), jnp.float32)
        given = normal(tokens, width), *weights, jnp.asarray(chosen), gates, *biases
        exact = [one.astype(jnp.float32) if jnp.issubdtype(one.dtype, jnp.floating) else one for one in given]
        cases.append((given, jax.jit(partial(pallas_kernels.fused_experts, **own, implementation="xla"))(*exact)))

    def distance(chosen: Choice) -> float:
        run = jax.jit(partial(pallas_kernels.fused_experts, **own, implementation=chosen))
        return max(_distance(run(*given), wanted) for given, wanted in cases)

    return distance


OPERATIONS: dict[str, Callable[[Shape, str, str, bool], Distance]] = {
    "paged_decode": _decode,
    "paged_prefill": _prefill,
    "write_kv": _write,
    "sample": _sample,
    "fused_linear": _fused,
    "fused_topk": _topk,
    "fused_experts": _experts,
}


class _Pool:
    """A cache with sequences of given lengths in blocks of random order, and NaN elsewhere."""

    def __init__(self, shape: Shape, lengths: Any, dtype: str, cache_dtype: str) -> None:
        self.random, self.lengths, size = np.random.default_rng(1), lengths, shape.block_tokens
        self.sinks = self.normal((shape.heads,), "float32") if shape.has_sinks else None
        counts = [-(-length // size) for length in lengths]
        order = self.random.permutation(sum(counts) + 5)
        width = max(counts) + 2
        tables = self.random.integers(0, len(order), (len(lengths), width))  # after a sequence: any block
        is_stored = np.zeros((len(order), size), bool)
        first = 0
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            tables[row, :count] = order[first : first + count]
            first += count
            at = np.arange(length)
            is_stored[tables[row, at // size], at % size] = True
        self.tables = jnp.asarray(tables, jnp.int32)
        mask = jnp.asarray(is_stored)[:, None, :, None]
        self.cache: dict[str, Any] = {}
        for name in ("k", "v") if shape.value_size is None else ("k",):
            numbers = self.normal((len(order), shape.kv_heads, size, shape.size), "float32")
            if cache_dtype in SCALED:
                self.cache[name], scales = pallas_kernels.quantize(numbers, jnp.dtype(cache_dtype))
                self.cache[f"{name}_scales"] = jnp.where(mask[..., 0], scales, jnp.nan)
            else:
                self.cache[name] = jnp.where(mask, numbers.astype(cache_dtype), jnp.nan)

    def normal(self, shape: tuple[int, ...], dtype: str) -> jax.Array:
        return jnp.asarray(self.random.standard_normal(shape, np.float32)).astype(dtype)


def _against(attend: Any, q: jax.Array, pool: _Pool, arrays: tuple[jax.Array, ...]) -> Distance:
    """Compare with the reference on the same numbers in float32."""
    cache = {name: one for name, one in (pool.cache | {"sinks": pool.sinks}).items() if one is not None}
    exact = {
        name: one.astype(jnp.float32) if one.dtype in (jnp.bfloat16, jnp.float16) else one
        for name, one in cache.items()
    }

    def call(q: jax.Array, implementation: str | Choice, cache: dict[str, Any], *arrays: jax.Array) -> jax.Array:
        options = {name: cache.get(name) for name in ("k_scales", "v_scales", "sinks")}
        return attend(q, cache["k"], cache.get("v"), *arrays, **options, implementation=implementation)

    run = jax.jit(call, static_argnums=1)
    wanted = run(q.astype(jnp.float32), "xla", exact, *arrays)
    return lambda chosen: _distance(run(q, chosen, cache, *arrays), wanted)


def _whole(cache: jax.Array, scales: jax.Array | None) -> jax.Array:
    wide = cache.astype(jnp.float32)
    return wide if scales is None else wide * scales[..., None]


def _distance(found: Any, wanted: Any) -> float:
    """Return the largest length of a difference, relative to the length of the expected vector; NaN if any is."""
    one, other = (np.asarray(array.astype(jnp.float32), np.float64) for array in (found, wanted))
    off = np.linalg.norm(one - other, axis=-1)
    lengths = np.linalg.norm(other, axis=-1)
    return float(np.max(off / np.where(lengths > 0, lengths, 1e-6)))
