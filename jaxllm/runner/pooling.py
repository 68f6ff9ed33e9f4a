"""A traced step of a pooling model: layers over whole prompts or chunks, then one vector per prompt.

W numbers of a result, L tokens of a bin, H heads on one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax, named_scope

from jaxllm.metrics import Metrics
from jaxllm.model import decoder, layers, pooler
from jaxllm.model.decoder import Attend, Heads, Params
from jaxllm.model.pooler import Pooler
from jaxllm.model.sharding import Layout
from jaxllm.model.spec import Spec, heads_per_shard
from jaxllm.runner import batch, encoder_batch, step
from jaxllm.runner.attention import attention
from jaxllm.runner.batch import Shape
from jaxllm.runner.compiled_programs import Key, ProgramKeys, ProgramTable
from jaxllm.runner.step_model import Leaves, StepModel
from jaxllm.scheduler.state import Plan
from jaxllm.setup import kv_cache
from jaxllm.setup.kv_cache import Geometry, KvLayer, Leaf
from pallas_kernels.kv_cache.xla import rotate

# Queries of a bin that attend at once, so that scores fit in a cache: 2,048 tokens in bins of 512 take 30 ms, else 58
# (two Zen 5 cores).
_PIECE = 128
_LOWEST = -1e30  # below every score and finite, see pallas_kernels/attention/xla.py


@struct.dataclass
class PoolState(Generic[Leaf]):
    """Arrays that a step replaces; empty for whole prompts."""

    kv: tuple[KvLayer[Leaf], ...] = ()
    tables: Leaf | None = None  # int32[S, M]
    sums: Leaf | None = None  # float32[S, D]: of hidden states of a prompt's earlier chunks, for mean pooling


def abstract(
    spec: Spec, head: Pooler, geometry: Geometry, layout: Layout, cache_dtype: jnp.dtype
) -> PoolState[jax.ShapeDtypeStruct]:
    if not spec.is_causal:
        return PoolState()
    of_slots = partial(jax.ShapeDtypeStruct, sharding=layout.sharding("slots"))
    return PoolState(
        kv=kv_cache.abstract_kv(spec, geometry, layout, cache_dtype),
        tables=of_slots((geometry.num_slots, geometry.max_blocks), jnp.int32),
        sums=of_slots((geometry.num_slots, spec.width), jnp.float32) if head.pooling == "mean" else None,
    )


class PoolPrograms(ProgramTable):
    """The programs of a pooling engine."""

    def __init__(self, made: Sequence[Shape], lower: Callable[[Key], Any], metrics: Metrics) -> None:
        self._ways: list[ProgramKeys] = [(Key(shape, None, "pool"),) for shape in made]
        first = encoder_batch.covering(made) if made[0].bin_tokens else [made[-1], made[0]]
        super().__init__([Key(shape, None, "pool") for shape in first], (key for (key,) in self._ways), lower, metrics)

    def choose(self, plan: Plan) -> Key:
        way = self.first_ready(way for way in self._ways if _fits(plan, way[0].shape))
        if way is None:
            raise RuntimeError(f"no program holds {len(plan.slots)} prompts of {plan.num_tokens} tokens")
        return way[0]


def _fits(plan: Plan, shape: Shape) -> bool:
    if shape.bin_tokens:
        return encoder_batch.place(plan.lengths, shape) is not None
    return batch.fits(batch.extent(plan), shape)


def build(model: StepModel, shape: Shape) -> Callable[[Leaves, Leaves, jax.Array], tuple[Leaves, jax.Array]]:
    """Return a step (weights, state, buffer) -> (state, results float32[R, W]), flat as `step.build`'s."""
    compute = _encode if shape.bin_tokens else _pool_chunks
    name = step.program_name(shape, None, "pool")
    return step.on_shards(model, partial(compute, model, shape), name, model.layout.spec())


def _pool_chunks(
    model: StepModel, shape: Shape, params: Params[jax.Array], state: PoolState[jax.Array], buffer: jax.Array
) -> tuple[PoolState[jax.Array], jax.Array]:
    """Compute chunks of prompts; a row's result is valid in its prompt's last chunk."""
    head = model.head
    assert isinstance(head, Pooler) and state.tables is not None
    field = step.fields_of(batch.fields(shape), buffer)
    table, slots, last = field["table"], field["token_slot"], field["row_last"]
    tables = state.tables.at[table[:, 0], table[:, 1]].set(table[:, 2], mode="drop")
    kv, positions = list(state.kv), field["token_position"]
    attend = attention(model.spec, model.geometry, model.kernels, shape, kv, tables, field, slots, positions)
    context = decoder.Context(positions, attend, layout=model.layout)
    hidden = decoder.forward(model.spec, params, field["tokens"], context)  # [T, D]
    row_slot, sums = field["row_slot"], state.sums
    with named_scope("pooling"):
        if sums is None:
            vectors = hidden.at[last].get(mode="clip")  # [R, D]
        else:
            is_own = slots[None] == row_slot[:, None]  # [R, T]
            ends = field["row_position"] + 1
            is_first = ends == jnp.sum(is_own, axis=1)
            before = jnp.where(is_first[:, None], 0, sums.at[row_slot].get(mode="clip"))
            total = before + _sums(is_own, hidden)
            sums = sums.at[row_slot].set(total, mode="drop")
            vectors = total / ends[:, None]
        result = pooler.apply(head, params.top, vectors)
    return PoolState(kv=tuple(kv), tables=tables, sums=sums), result


def _encode(
    model: StepModel, shape: Shape, params: Params[jax.Array], state: PoolState[jax.Array], buffer: jax.Array
) -> tuple[PoolState[jax.Array], jax.Array]:
    head = model.head
    assert isinstance(head, Pooler)
    field = step.fields_of(encoder_batch.fields(shape), buffer)
    row, first, lengths = field["token_row"], field["row_first"], field["row_length"]
    context = decoder.Context(
        field["token_position"],
        attention_in_bins(model.spec, model.layout, params, shape.bin_tokens, row),
        layout=model.layout,
        token_types=field["token_types"],
    )
    hidden = decoder.forward(model.spec, params, field["tokens"], context)  # [T, D]
    with named_scope("pooling"):
        if head.pooling == "mean":
            is_own = row[None] == jnp.arange(shape.rows)[:, None]  # [R, T]
            vectors = _sums(is_own, hidden) / jnp.maximum(lengths, 1)[:, None]
        else:
            vectors = hidden.at[first + (jnp.maximum(lengths, 1) - 1 if head.pooling == "last" else 0)].get(mode="clip")
        return state, pooler.apply(head, params.top, vectors)


def _sums(is_own: jax.Array, hidden: jax.Array) -> jax.Array:
    """Return the sums of each row's hidden states, float32[R, D]; non-finite ones affect only their row."""
    kind = hidden.dtype
    is_bad = ~jnp.isfinite(hidden).all(axis=1)  # [T]; zero times NaN is NaN
    finite = jnp.where(is_bad[:, None], 0, hidden)
    total = jnp.matmul(is_own.astype(kind), finite, precision="highest", preferred_element_type=jnp.float32)
    return jnp.where((is_own & is_bad).any(axis=1)[:, None], jnp.nan, total)


def attention_in_bins(spec: Spec, layout: Layout, params: Params[jax.Array], length: int, row: jax.Array) -> Attend:
    """Return the attention of tokens within their row, all in one bin of `length` tokens."""
    rows = row.reshape(-1, length)
    bias = None
    if spec.relative_buckets:
        table = params.top["relative_bias"]
        bias = layers.relative_bias(table, length, spec.relative_buckets, spec.relative_distance)  # [H, L, L]
    num_heads, kv_heads = heads_per_shard(spec, layout.shards("heads"))

    def attend(layer: int, heads: Heads, window: int | None, sinks: jax.Array | None) -> jax.Array:
        if sinks is not None:
            raise RuntimeError("read_spec lets no model through that has sinks and sees both sides")
        q, k, v = jnp.split(heads.qkv, (num_heads, num_heads + kv_heads), axis=1)
        if heads.turn is not None:
            q, k = (rotate(one, *heads.turn, heads.is_interleaved) for one in (q, k))
        q, k, v = (one.reshape(-1, length, kv_heads, one.shape[1] // kv_heads, one.shape[2]) for one in (q, k, v))
        q = q.transpose(0, 2, 3, 1, 4)  # [b, K, G, L, C]
        k, v = k[:, :, :, 0].swapaxes(1, 2), v[:, :, :, 0].swapaxes(1, 2)  # [b, K, L, C]
        # Non-finite values must affect only their row, and zero times NaN is NaN.
        is_bad = ~jnp.isfinite(v).all(axis=(1, 3))  # [b, L]
        v = jnp.where(is_bad[:, None, :, None], 0, v)

        def attend_piece(start: jax.Array, size: int) -> jax.Array:
            """Return the attention of `size` queries of each bin from `start` on: [b, K, G, size, C]."""
            some = lax.dynamic_slice_in_dim(q, start, size, axis=3)
            scores = jnp.einsum("bkgqc,bksc->bkgqs", some, k, preferred_element_type=jnp.float32) * spec.attention_scale
            scores = layers.softcap(scores, spec.attention_softcap)
            if bias is not None:
                own_bias = lax.dynamic_slice_in_dim(bias, start, size, axis=1)
                scores += own_bias.reshape(kv_heads, num_heads // kv_heads, size, length)
            is_seen = lax.dynamic_slice_in_dim(rows, start, size, axis=1)[:, :, None] == rows[:, None]  # [b, size, L]
            if window is not None:
                is_seen &= jnp.abs(start + jnp.arange(size)[:, None] - jnp.arange(length)) < window
            scores = jnp.where(is_seen[:, None, None], scores, _LOWEST)
            weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
            total = jnp.sum(weights, axis=-1, keepdims=True)
            total = jnp.where((is_seen & is_bad[:, None]).any(axis=2)[:, None, None, :, None], jnp.nan, total)
            return (
                jnp.einsum("bkgqs,bksc->bkgqc", weights.astype(v.dtype), v, preferred_element_type=jnp.float32) / total
            )

        with named_scope("attend"):
            whole = length // _PIECE * _PIECE if length > _PIECE else 0
            parts = []
            if whole:
                found = lax.map(lambda start: attend_piece(start, _PIECE), jnp.arange(0, whole, _PIECE))
                parts.append(jnp.moveaxis(found, 0, 3).reshape(*q.shape[:3], whole, -1))
            if whole < length:
                parts.append(attend_piece(jnp.int32(whole), length - whole))
            mixed = jnp.concatenate(parts, axis=3).transpose(0, 3, 1, 2, 4)  # [b, L, K, G, C]
            return mixed.reshape(len(row), num_heads, -1).astype(heads.qkv.dtype)

    return attend
