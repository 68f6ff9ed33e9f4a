"""One engine step as a function that is traced once per program: forward, attention, logits, sampling, slot update.

Pure and without a host: it takes weights, the donated state and the packed batch, and returns the next state and one
buffer of results. A step can also run as two programs: `build_forward` ends with logits, and `build_sample` goes on
from them, with masks that the host makes in between. Knows how batch.py lays the buffers out; knows no scheduler and no
compiled program.

Letters: T flat tokens, R rows, Y tiles, S slots, M blocks per slot, P tokens per block, N blocks, Vx vocabulary
of one shard.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, named_scope
from jax.sharding import Mesh, PartitionSpec

import pallas_kernels
from jaxllm.model import decoder, lora
from jaxllm.model.decoder import Heads, Params
from jaxllm.model.lora_linear import adapted_linear
from jaxllm.model.pooler import Pooler
from jaxllm.model.sharding import AXIS
from jaxllm.model.spec import Spec
from jaxllm.runner import batch
from jaxllm.runner.batch import Shape
from jaxllm.runner.device_state import DeviceState, Geometry
from jaxllm.sampling import sampler
from jaxllm.sampling.sampler import Extras, Processor, Sampled, Variant
from jaxllm.sampling.vocab_parallel import Vocabulary
from pallas_kernels import Choice

if TYPE_CHECKING:
    from jaxllm.runner.scoring import Score

Leaves = tuple[jax.Array, ...]
Adapter = lora.Adapter[jax.Array]
MOST_LOGPROBS = 20  # likeliest tokens that a step reports; requests for more are scored from whole rows (scoring.py)

# Code that layers and programs share is jitted by itself: here, in sampler.py and in model/. JAX then traces it once
# for all calls with the same shapes, and a program's text holds it once; XLA inlines it before all else. Two programs
# of the 0.5B shape, 24 layers, are traced in 1.1 s this way and in 4.3 s without; with experts in 1.4 and 4.9
# (DECISIONS, 73).
_write_kv = jax.jit(pallas_kernels.write_kv, static_argnames=("is_interleaved", "implementation"))
_SETTINGS = ("scale", "window", "softcap", "value_size", "implementation")
_paged_decode = jax.jit(pallas_kernels.paged_decode, static_argnames=_SETTINGS)
_paged_prefill = jax.jit(pallas_kernels.paged_prefill, static_argnames=(*_SETTINGS, "tile"))


@dataclass(frozen=True)
class Result:
    """What a step sampled, on the host: a row for each row of its plan."""

    tokens: np.ndarray  # int32[R]
    is_finite: np.ndarray  # bool[R]
    logprob: np.ndarray | None = None  # float32[R]; this and what follows only where the variant computes it
    rank: np.ndarray | None = None  # int32[R]
    top_logprobs: np.ndarray | None = None  # float32[R, n]
    top_ids: np.ndarray | None = None  # int32[R, n]
    reported: np.ndarray | None = None  # float32[R, MAX_REPORTED_TOKENS]
    scores: Sequence[Score] = ()  # of the positions that `Runner.dispatch` was given
    pooled: np.ndarray | None = None  # float32[R, W], of a model that pools, where no tokens are sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """What all programs of an engine have in common."""

    spec: Spec
    geometry: Geometry
    num_logprobs: int  # likeliest tokens that a step returns
    extras: Extras
    processors: Sequence[Processor]
    mesh: Mesh
    params: Params[jax.ShapeDtypeStruct]
    state: Any  # the device's state, described: a DeviceState, or a PoolState
    kernels: Mapping[str, Choice]
    pooler: Pooler | None = None  # of a model that pools
    adapter: lora.Adapter[jax.ShapeDtypeStruct] = ()  # each one, described; empty: there are none
    joins_adapters: bool = False  # see `adapted_linear`


def build(model: StepModel, shape: Shape, variant: Variant) -> Callable[..., tuple[Leaves, jax.Array]]:
    """Return the step of one program as a function of flat tuples: (weights, state, buffer) -> (state, results).

    A program with adapters takes the leaves of each of them, too, as further arguments.
    Flat, because flattening a tree in each call costs other engines 17 to 34 ms a step (DECISIONS, "Flat arguments").
    """

    def run(
        weights: Params[jax.Array], state: DeviceState[jax.Array], buffer: jax.Array, *adapters: Adapter
    ) -> tuple[DeviceState[jax.Array], jax.Array]:
        following, sampled = _step(model, shape, variant, weights, state, buffer, adapters)
        return following, join(sampled)

    return on_shards(model, run, program_name(shape, variant), PartitionSpec(), shape.adapters)


def build_forward(model: StepModel, shape: Shape) -> Callable[..., tuple[Leaves, jax.Array]]:
    """Return the first half of a step: (weights, state, buffer) -> (state, logits), f32[R, V] over the shards."""

    def run(
        weights: Params[jax.Array], state: DeviceState[jax.Array], buffer: jax.Array, *adapters: Adapter
    ) -> tuple[DeviceState[jax.Array], jax.Array]:
        field = fields_of(batch.fields(shape), buffer)
        following, logits, _ = _forward(model, shape, True, weights, state, field, adapters)
        return following, logits

    return on_shards(model, run, program_name(shape, None), PartitionSpec(None, AXIS), shape.adapters)


def on_shards(
    model: StepModel,
    run: Callable[..., tuple[Any, jax.Array]],
    name: str,
    result: PartitionSpec,
    num_adapters: int = 0,
) -> Callable[..., tuple[Leaves, jax.Array]]:
    """Return a function of trees as one of flat tuples over the mesh; `result` is how its second result is divided."""
    params, state, adapter = model.params, model.state, model.adapter
    params_tree, state_tree, adapter_tree = map(jax.tree.structure, (params, state, adapter))

    def on_shard(
        params_leaves: Leaves, state_leaves: Leaves, buffer: jax.Array, *adapters: Leaves
    ) -> tuple[Leaves, jax.Array]:
        weights = jax.tree.unflatten(params_tree, params_leaves)
        trees = (jax.tree.unflatten(adapter_tree, leaves) for leaves in adapters)
        following, returned = run(weights, jax.tree.unflatten(state_tree, state_leaves), buffer, *trees)
        return tuple(jax.tree.leaves(following)), returned

    # What a trace calls the program. Part of its name in the compilation cache, too: what is found there has the scopes
    # of the code that compiled it, for keys hold no scopes.
    on_shard.__name__ = name
    params_specs, state_specs, adapter_specs = (
        tuple(leaf.sharding.spec for leaf in jax.tree.leaves(tree)) for tree in (params, state, adapter)
    )
    return jax.shard_map(
        on_shard,
        mesh=model.mesh,
        in_specs=(params_specs, state_specs, PartitionSpec(), *(adapter_specs,) * num_adapters),
        out_specs=(state_specs, result),
        check_vma=False,  # kernels inside of shard_map declare no varying axes
    )


def build_sample(model: StepModel, num_rows: int, variant: Variant) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return the second half: (tokens, sampling, extras, logits, buffer) -> (tokens, results).

    The first three are leaves of the state; the buffer is laid out by `batch.pack_masks`.
    """

    def on_shard(
        tokens: jax.Array, sampling: jax.Array, extras: jax.Array, logits: jax.Array, buffer: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        place = {name: buffer[:, at] for at, name in enumerate(batch.MASK_COLUMNS)}
        mask = buffer[:, len(batch.MASK_COLUMNS) :], place["is_masked"]
        samples = place["samples"] > 0
        position = place["row_position"]
        tokens, sampled = _sample(
            model, variant, tokens, sampling, extras, logits, place["row_slot"], position, samples, mask
        )
        return tokens, join(sampled)

    on_shard.__name__ = f"sample_{num_rows}_{variant.value}"
    return jax.shard_map(
        on_shard,
        mesh=model.mesh,
        in_specs=(PartitionSpec(),) * 3 + (PartitionSpec(None, AXIS), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )


def compiler_options(platform: str, is_deterministic: bool = False) -> dict[str, str]:
    """Return the options of XLA's compiler that steps are compiled with, beside its defaults.

    On a GPU, sums over devices go into the CUDA graph too: without that a decode step over four devices is as many
    graphs as there are sums, 65 for 32 layers. The list is XLA's own with COLLECTIVES at its end; a list in XLA_FLAGS
    is left as it is.

    Deterministic mode needs products in which a row's bits do not depend on which row it is. Libraries do not promise
    that: a kernel that distributes tiles and depth together ("stream-K") splits the sum of only some tiles.
    XLA's own Triton products sum each tile from first to last where nothing is split.
    """
    if platform != "gpu":
        return {}
    options = {}
    if is_deterministic:
        options = {
            "xla_gpu_triton_gemm_any": "True",
            "xla_gpu_cublas_fallback": "False",
            "xla_gpu_experimental_force_split_k": "1",
        }
    if "xla_gpu_enable_command_buffer" in os.environ.get("XLA_FLAGS", ""):
        return options
    kinds = "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION,COLLECTIVES"
    return options | {"xla_gpu_enable_command_buffer": kinds}


def program_name(shape: Shape, variant: Variant | None, part: str = "forward") -> str:
    """Name the program of a shape and a variant, as decode_64_greedy; a trace writes `jit_` before it.

    Without a variant it is named after its `part` of a step, as decode_64_forward.
    """
    kind = "decode" if shape.is_decode else "ragged"
    if shape.bin_tokens:
        kind = f"encode_{shape.bin_tokens}"
    with_adapters = f"_adapters_{shape.adapters}" if shape.adapters else ""
    return f"{kind}_{shape.tokens}{with_adapters}_{part if variant is None else variant.value}"


def num_logprobs(max_logprobs: int, vocab_size: int) -> int:
    """Return how many of the likeliest tokens a step reports, where requests may ask for `max_logprobs`; -1: all."""
    return min(MOST_LOGPROBS if max_logprobs == -1 else max_logprobs, MOST_LOGPROBS, vocab_size)


def read(joined: np.ndarray, num_rows: int, num_logprobs: int) -> Result:
    """Take a step's results apart, int32[R, W] as `build` returns them; rows behind `num_rows` were padding."""
    joined = np.ascontiguousarray(joined[:num_rows].T)  # [W, R]
    tokens, is_finite = joined[0], joined[1].astype(np.bool_)
    if len(joined) == 2:
        return Result(tokens, is_finite)
    ids_at, reported_at = 4 + num_logprobs, 4 + 2 * num_logprobs
    return Result(
        tokens=tokens,
        is_finite=is_finite,
        logprob=joined[2].view(np.float32),
        rank=joined[3],
        top_logprobs=joined[4:ids_at].view(np.float32).T,
        top_ids=joined[ids_at:reported_at].T,
        reported=joined[reported_at:].view(np.float32).T if len(joined) > reported_at else None,
    )


def patch(tables: jax.Array, tokens: jax.Array, changes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Write into the block tables and the tokens ahead of a step what does not fit into its buffer.

    `changes` is int32[2, W, 3] of (slot, index, value), first those of the tables; slot S is dropped.
    """

    def patched(array: jax.Array, change: jax.Array) -> jax.Array:
        return array.at[change[:, 0], change[:, 1]].set(change[:, 2], mode="drop")

    return patched(tables, changes[0]), patched(tokens, changes[1])


def build_copy(model: StepModel) -> Callable[[Leaves, jax.Array], Leaves]:
    """Return what copies blocks of all layers ahead of a step: (KV leaves, copies) -> KV leaves.

    `copies` is int32[C, 2], of source and target; a target of N or more is dropped, and no two are the same.
    """

    def on_shard(leaves: Leaves, copies: jax.Array) -> Leaves:
        copy = partial(pallas_kernels.copy_blocks, sources=copies[:, 0], targets=copies[:, 1], implementation="xla")
        return tuple(copy(leaf, None)[0] for leaf in leaves)

    on_shard.__name__ = "copy_blocks"
    specs = tuple(leaf.sharding.spec for leaf in jax.tree.leaves(model.state.kv))
    return jax.shard_map(on_shard, mesh=model.mesh, in_specs=(specs, PartitionSpec()), out_specs=specs, check_vma=False)


def patch_extras(extras: jax.Array, changes: jax.Array) -> jax.Array:
    """Write the extras of newly admitted requests into int32[S, F], ahead of their first step.

    `changes` is int32[W, 1 + F]: slots, each with its `sampling.Extras`; slot S is dropped.
    """
    return extras.at[changes[:, 0]].set(changes[:, 1:], mode="drop")


def fields_of(table: Mapping[str, tuple[int, tuple[int, ...]]], buffer: jax.Array) -> dict[str, jax.Array]:
    """Take a packed batch apart by the table of its fields."""
    return {
        name: lax.slice_in_dim(buffer, offset, offset + int(np.prod(size))).reshape(size)
        for name, (offset, size) in table.items()
    }


def _step(
    model: StepModel,
    shape: Shape,
    variant: Variant,
    params: Params[jax.Array],
    state: DeviceState[jax.Array],
    buffer: jax.Array,
    adapters: Sequence[Adapter],
) -> tuple[DeviceState[jax.Array], Sampled]:
    field = fields_of(batch.fields(shape), buffer)
    following, logits, samples = _forward(model, shape, variant is Variant.FULL, params, state, field, adapters)
    slots = following.tokens, following.sampling, following.extras
    tokens, sampled = _sample(model, variant, *slots, logits, field["row_slot"], field["row_position"], samples)
    return replace(following, tokens=tokens), sampled


def _forward(
    model: StepModel,
    shape: Shape,
    keeps_hidden: bool,
    params: Params[jax.Array],
    state: DeviceState[jax.Array],
    field: Mapping[str, jax.Array],
    adapters: Sequence[Adapter],
) -> tuple[DeviceState[jax.Array], jax.Array, jax.Array]:
    """Compute a batch's tokens: the state behind it, each row's logits, f32[R, Vx], and which rows are sampled."""
    spec, geometry = model.spec, model.geometry
    row_slot, table = field["row_slot"], field["table"]
    tables = state.tables.at[table[:, 0], table[:, 1]].set(table[:, 2], mode="drop")
    rows, known = state.sampling, state.tokens
    if shape.is_decode:
        slots, positions = row_slot, field["row_position"]
        tokens = known.at[slots, positions].get(mode="clip")
        last, samples = jnp.arange(shape.rows), row_slot < geometry.num_slots
    else:
        slots, positions = field["token_slot"], field["token_position"]
        is_on_device = jnp.arange(shape.tokens) < field["num_decodes"]
        tokens = jnp.where(is_on_device, known.at[slots, positions].get(mode="clip"), field["tokens"])
        known = known.at[slots, positions].set(tokens, mode="drop")
        rows = rows.at[row_slot].set(field["sampling"], mode="drop")
        last, samples = field["row_last"], field["row_samples"] > 0

    kv = list(state.kv)
    attend = attention(model, shape, kv, tables, field, slots, positions)
    context = decoder.Context(positions, attend, axis=AXIS)
    if adapters:
        linear = adapted_linear(adapters, field["token_adapter"], model.joins_adapters)
        context = replace(context, linear=linear)
    hidden = decoder.forward(spec, params, tokens, context)  # [T, D]
    kept = state.hidden
    if keeps_hidden:
        kept = lax.dynamic_update_slice(kept, hidden.astype(kept.dtype), (0, 0))
    logits = decoder.head(spec, params, hidden.at[last].get(mode="clip"))  # [R, Vx]
    following = DeviceState(kv=tuple(kv), tables=tables, tokens=known, sampling=rows, extras=state.extras, hidden=kept)
    return following, logits, samples


def _sample(
    model: StepModel,
    variant: Variant,
    tokens: jax.Array,
    sampling: jax.Array,
    extras: jax.Array,
    logits: jax.Array,
    row_slot: jax.Array,
    row_position: jax.Array,
    samples: jax.Array,
    mask: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, Sampled]:
    """Choose each row's next token, and write it into its slot's tokens, int32[S, M * P], where `samples` says so."""
    with named_scope("sampling"):
        ends = row_position + 1
        here = sampler.unpack_rows(sampling.at[row_slot].get(mode="clip"))
        history, own = None, None
        if variant is Variant.FULL:
            history = tokens.at[row_slot].get(mode="clip")
            own = model.extras.unpack(extras.at[row_slot].get(mode="clip"))
        vocabulary = Vocabulary(model.spec.vocab_size, AXIS)
        sampled = sampler.sample(
            logits,
            here,
            ends,
            history,
            own,
            variant,
            model.num_logprobs,
            vocabulary,
            model.processors,
            model.kernels["sample"],
            mask,
        )
        slots = jnp.where(samples, row_slot, model.geometry.num_slots)
        return tokens.at[slots, ends].set(sampled.tokens, mode="drop"), sampled


def attention(
    model: StepModel,
    shape: Shape,
    kv: list[tuple[jax.Array, jax.Array | None]],
    tables: jax.Array,
    field: Mapping[str, jax.Array],
    slots: jax.Array,
    positions: jax.Array,
) -> decoder.Attend:
    """Return the function that stores a layer's keys and values in `kv`, then attends over the cache."""
    spec, geometry, kernels = model.spec, model.geometry, model.kernels
    size = geometry.block_size
    # Padding must not be stored; its places are all different because the scatter is promised unique ones.
    nowhere = geometry.num_blocks + jnp.arange(shape.tokens)
    stored_in = tables.at[slots, positions // size].get(mode="clip")
    is_real = slots < geometry.num_slots
    stored_in = jnp.where(is_real, stored_in, nowhere)
    offsets = positions % size
    # Those that attend by themselves: all tokens, or the first R, of which the decode rows do.
    alone = slice(None) if not shape.tiles else slice(shape.rows)
    alone_tables = tables.at[slots[alone]].get(mode="clip")  # [T or R, M]
    lengths = jnp.where(is_real, positions + 1, 0)
    if shape.tiles:
        lengths = jnp.where(jnp.arange(shape.rows) < field["num_decodes"], lengths[alone], 0)
        tile_tables = tables.at[field["tile_slot"]].get(mode="clip")  # [Y, M]

    def attend(layer: int, heads: Heads, window: int | None, sinks: jax.Array | None) -> jax.Array:
        with named_scope("cache_write"):
            written = _write_kv(
                heads.qkv,
                *kv[layer],
                stored_in,
                offsets,
                turn=heads.turn,
                is_interleaved=heads.is_interleaved,
                implementation=kernels["write_kv"],
            )
        q, keys, values = written.q, written.k_cache, written.v_cache
        kv[layer] = keys, values
        options: dict[str, Any] = {
            "scale": spec.attention_scale,
            "window": window,
            "softcap": spec.attention_softcap,
            "sinks": sinks,
            "value_size": spec.latent.rank if spec.latent else None,
        }
        with named_scope("attend"):
            decoded = _paged_decode(
                q[alone],
                keys,
                values,
                alone_tables,
                lengths,
                implementation=kernels["paged_decode"],
                **options,
            )
            if not shape.tiles:
                return decoded
            chunks = _paged_prefill(
                q,
                keys,
                values,
                tile_tables,
                field["tile_start"],
                field["tile_length"],
                field["tile_position"],
                tile=batch.TILE,
                implementation=kernels["paged_prefill"],
                **options,
            )
            return chunks.at[: shape.rows].add(decoded)  # what one of them does not cover, it leaves zero

    return attend


def join(sampled: Sampled) -> jax.Array:
    """Lay all results side by side, int32[R, W], so that they reach the host in one transfer."""
    columns = [sampled.tokens[:, None], sampled.is_finite[:, None].astype(jnp.int32)]
    if sampled.logprob is not None:
        assert sampled.rank is not None and sampled.top_logprobs is not None and sampled.top_ids is not None
        columns += [
            lax.bitcast_convert_type(sampled.logprob, jnp.int32)[:, None],
            sampled.rank[:, None],
            lax.bitcast_convert_type(sampled.top_logprobs, jnp.int32),
            sampled.top_ids,
        ]
        if sampled.reported is not None:
            columns.append(lax.bitcast_convert_type(sampled.reported, jnp.int32))
    return jnp.concatenate(columns, axis=1)
