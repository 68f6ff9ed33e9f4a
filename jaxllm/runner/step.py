"""One engine step as a traced function: forward, attention, logits, sampling, slot update. Pure.

Takes weights, the donated state and the packed batch; returns the next state and one array of results. Letters as in
ARCHITECTURE.md; Vx is the vocabulary of one shard.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, named_scope
from jax.sharding import PartitionSpec

import pallas_kernels
from jaxllm.model import decoder, fused, layers
from jaxllm.model.decoder import Params
from jaxllm.model.sharding import Layout
from jaxllm.runner import batch, draft_models, drafting, pipeline, timestamps
from jaxllm.runner.attention import attention, cross_attention
from jaxllm.runner.batch import Shape
from jaxllm.runner.device_state import DeviceState
from jaxllm.runner.drafting import SamplePositions
from jaxllm.runner.results import join, result_width
from jaxllm.runner.step_model import Leaves, StepModel, products_of
from jaxllm.sampling import sampler
from jaxllm.sampling.sampler import Sampled, Variant
from jaxllm.sampling.vocab_parallel import Vocabulary


def build(model: StepModel, shape: Shape, variant: Variant) -> Callable[..., tuple[Leaves, jax.Array]]:
    """Return a program's step: (weights, state, buffer, leaves of each adapter) -> (state, results).

    Flat tuples: flattening trees in every call costs other engines 17 to 34 ms a step.
    """

    def run(
        weights: Params[jax.Array], state: DeviceState[jax.Array], buffer: jax.Array, *adapters: Any
    ) -> tuple[DeviceState[jax.Array], jax.Array]:
        state, field = unpack(shape, state, buffer)
        following, logits, laid, aux = _forward(model, shape, variant is Variant.FULL, weights, state, field, adapters)
        following, joined = finish(model, shape, variant, weights, following, field, laid, aux, logits)
        return following, into(state, buffer, joined)

    return on_shards(model, run, program_name(shape, variant), model.layout.spec("ranks"), shape.adapters)


def build_forward(model: StepModel, shape: Shape) -> Callable[..., tuple[Leaves, jax.Array]]:
    """Return the first half of a step: (weights, state, buffer) -> (state, logits), f32[R, V] over the shards."""

    def run(
        weights: Params[jax.Array], state: DeviceState[jax.Array], buffer: jax.Array, *adapters: Any
    ) -> tuple[DeviceState[jax.Array], jax.Array]:
        state, field = unpack(shape, state, buffer)
        following, logits, _, aux = _forward(model, shape, True, weights, state, field, adapters)
        if aux and following.drafted is not None:
            following = replace(following, drafted=draft_models.keep(following.drafted, aux))
        return following, logits

    return on_shards(model, run, program_name(shape, None), model.layout.spec("ranks", "vocab"), shape.adapters)


def on_shards(
    model: StepModel,
    run: Callable[..., tuple[Any, jax.Array]],
    name: str,
    result: PartitionSpec,
    num_adapters: int = 0,
    further: Sequence[PartitionSpec] = (),
) -> Callable[..., tuple[Leaves, jax.Array]]:
    """Return a function of trees as one of flat tuples over the mesh.

    `result` is the sharding of its second result. Leaves of adapters, or `further` arrays, follow the buffer.
    """
    params, state = model.params, model.state
    adapter = () if model.adapters is None else model.adapters.described
    params_tree, state_tree, adapter_tree = map(jax.tree.structure, (params, state, adapter))

    def on_shard(
        params_leaves: Leaves, state_leaves: Leaves, buffer: jax.Array, *behind: Any
    ) -> tuple[Leaves, jax.Array]:
        weights = jax.tree.unflatten(params_tree, params_leaves)
        trees = behind if further else (jax.tree.unflatten(adapter_tree, leaves) for leaves in behind)
        with products_of(model):
            following, returned = run(weights, jax.tree.unflatten(state_tree, state_leaves), buffer, *trees)
        return tuple(jax.tree.leaves(following)), returned

    # The name in traces and in the compilation cache; its keys omit scopes.
    on_shard.__name__ = name
    params_specs, state_specs, adapter_specs = (
        tuple(leaf.sharding.spec for leaf in jax.tree.leaves(tree)) for tree in (params, state, adapter)
    )
    in_specs = (params_specs, state_specs, model.layout.spec("ranks"), *(adapter_specs,) * num_adapters, *further)
    return model.layout.shard_map(on_shard, in_specs, (state_specs, result))


def build_sample(model: StepModel, num_rows: int, variant: Variant) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return the second half of a step: (tokens, sampling, extras, logits, masks) -> (tokens, results)."""

    def on_shard(
        tokens: jax.Array, sampling: jax.Array, extras: jax.Array, logits: jax.Array, masks: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        place, mask = _read_masks(masks)
        if model.first_timestamp is not None:
            vocabulary = Vocabulary(model.spec.vocab_size, model.layout)
            mask = timestamps.narrowed(logits, mask, model.first_timestamp, vocabulary)
        at = SamplePositions(place["row_slot"], place["row_position"], place["samples"] > 0)
        ends = at.positions + 1
        sampled = _sample(model, variant, tokens, sampling, extras, logits, at, ends, mask)
        return _append(model, tokens, at, ends, sampled), join(sampled)

    on_shard.__name__ = f"sample_{num_rows}_{variant.value}"
    of_rank = model.layout.spec("ranks")
    return model.layout.shard_map(on_shard, (*(of_rank,) * 3, *_of_halves(model)), of_rank)


def build_finish(model: StepModel, shape: Shape, variant: Variant) -> Callable[..., tuple[Leaves, jax.Array]]:
    """Return the second half of a step that drafts: (weights, state, same buffer, logits, masks) -> (state,
    results).
    """

    def run(
        weights: Params[jax.Array],
        state: DeviceState[jax.Array],
        buffer: jax.Array,
        logits: jax.Array,
        masks: jax.Array,
    ) -> tuple[DeviceState[jax.Array], jax.Array]:
        state, field = unpack(shape, state, buffer)
        laid = lay_out(model, shape, state, field)
        assert state.drafted is not None
        aux = tuple(states[: shape.tokens] for states in state.drafted.aux)
        mask = _read_masks(masks)[1]
        following, joined = finish(model, shape, variant, weights, state, field, laid, aux, logits, mask)
        return following, into(state, buffer, joined)

    name = f"finish_{program_name(shape, variant)}"
    return on_shards(model, run, name, model.layout.spec("ranks"), further=_of_halves(model))


def _of_halves(model: StepModel) -> tuple[PartitionSpec, PartitionSpec]:
    return model.layout.spec("ranks", "vocab"), model.layout.spec("ranks")


def _read_masks(masks: jax.Array) -> tuple[dict[str, jax.Array], tuple[jax.Array, jax.Array]]:
    place = {name: masks[:, at] for at, name in enumerate(batch.MASK_COLUMNS)}
    return place, (masks[:, len(batch.MASK_COLUMNS) :], place["is_masked"])


def compiler_options(platform: str, is_deterministic: bool = False) -> dict[str, str]:
    """Return XLA's compiler options for steps.

    On a GPU, CUDA graphs include collectives: else a decode step over four devices is 65 graphs for 32 layers. The list
    is XLA's default and COLLECTIVES; XLA_FLAGS overrides it.

    In deterministic mode a row's bits must not depend on its index in a product, as in libraries' "stream-K" kernels.
    XLA's Triton products sum each tile in order if not split.
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
    if jax.process_count() > 1:
        # Each process tunes all kernels: one that reads a kept program would never send its share.
        options["xla_gpu_shard_autotuning"] = "False"
    if "xla_gpu_enable_command_buffer" in os.environ.get("XLA_FLAGS", ""):
        return options
    kinds = "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION,COLLECTIVES"
    return options | {"xla_gpu_enable_command_buffer": kinds}


def program_name(shape: Shape, variant: Variant | None, part: str = "forward") -> str:
    """Return a program's name, for example decode_64_greedy, or decode_64_forward for a `part` without variant."""
    kind = "decode" if shape.is_decode else "ragged"
    if shape.bin_tokens:
        kind = f"encode_{shape.bin_tokens}"
    with_adapters = f"_adapters_{shape.adapters}" if shape.adapters else ""
    if shape.drafts:
        kind += f"_drafts_{shape.rows}"
    return f"{kind}_{shape.tokens}{with_adapters}_{part if variant is None else variant.value}"


def patch(tables: jax.Array, tokens: jax.Array, changes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Write block-table entries and tokens that exceed a step's buffer.

    `changes` is int32[2, W, 3] of (slot, index, value), those of the tables first; slot S is dropped.
    """

    def patched(array: jax.Array, change: jax.Array) -> jax.Array:
        return array.at[change[:, 0], change[:, 1]].set(change[:, 2], mode="drop")

    return patched(tables, changes[0]), patched(tokens, changes[1])


def build_copy(
    layout: Layout, kv: Sequence[jax.ShapeDtypeStruct], name: str = "copy_blocks"
) -> Callable[[Leaves, jax.Array], Leaves]:
    """Return a function that copies blocks of a group: (KV leaves, copies) -> KV leaves.

    `copies` is int32[C, 2] of source and distinct target; targets from N on are dropped.
    """

    def on_shard(leaves: Leaves, copies: jax.Array) -> Leaves:
        copy = partial(pallas_kernels.copy_blocks, sources=copies[:, 0], targets=copies[:, 1])
        return tuple(copy(leaf, None)[0] for leaf in leaves)

    on_shard.__name__ = name
    specs = tuple(leaf.sharding.spec for leaf in kv)  # pyright: ignore[reportOptionalMemberAccess]
    return layout.shard_map(on_shard, (specs, layout.spec("ranks")), specs)


def patch_extras(extras: jax.Array, changes: jax.Array) -> jax.Array:
    """Write the extras of admitted requests into int32[S, F].

    `changes` is int32[W, 1 + F] of slots and `sampling.Extras`; slot S is dropped.
    """
    return extras.at[changes[:, 0]].set(changes[:, 1:], mode="drop")


def fields_of(table: Mapping[str, tuple[int, tuple[int, ...]]], buffer: jax.Array) -> dict[str, jax.Array]:
    return {
        name: lax.slice_in_dim(buffer, offset, offset + int(np.prod(size))).reshape(size)
        for name, (offset, size) in table.items()
    }


def unpack(
    shape: Shape, state: DeviceState[jax.Array], buffer: jax.Array
) -> tuple[DeviceState[jax.Array], dict[str, jax.Array]]:
    """Return the state and the fields of a packed batch, copied into the state if that stores batches.

    XLA records a CUDA graph's command again when a buffer moves, as each batch does. Without the barrier XLA would read
    it in more places than the copy.
    """
    table = batch.fields(shape)
    state, buffer = keep(state, buffer, batch.size_of(table))
    return state, fields_of(table, buffer)


def keep(state: DeviceState[jax.Array], buffer: jax.Array, size: int) -> tuple[DeviceState[jax.Array], jax.Array]:
    """Return the state with the first `size` numbers of a packed batch, if it stores batches, and the batch to read."""
    if state.batch is not None:
        place = state.batch
        packed = jnp.pad(buffer[:size], (0, len(place) - size))
        # One kernel; XLA would update a slice by an asynchronous copy.
        buffer = lax.optimization_barrier(jnp.where(jnp.arange(len(place)) < size, packed, place))
        state = replace(state, batch=buffer)
    return state, buffer


def into(state: DeviceState[jax.Array], buffer: jax.Array, joined: jax.Array) -> jax.Array:
    """Return the results, written into the donated batch array if the state stores batches.

    XLA would place temporary values in a separate array, whose address changes at every step.
    """
    return joined if state.batch is None else lax.dynamic_update_slice(buffer, joined.ravel(), (0,))


def sent_size(model: StepModel, shape: Shape, variant: Variant | None) -> int:
    """Return the length, in int32, of a program's batch argument; longer than the results if it returns them.

    XLA would place temporary values in an array that results overwrite entirely.
    """
    packed = batch.sent_size(shape, model.num_ticks)
    if model.state.batch is None or variant is None:
        return packed
    return max(packed, shape.sampled * result_width(variant, model.num_logprobs, shape.drafts > 0) + 1)


def donated(model: StepModel, variant: Variant | None) -> tuple[int, ...]:
    """Return the donated arguments' indices: the state, and the batch if it returns the results."""
    return (1,) if model.state.batch is None or variant is None else (1, 2)


class BatchLayout(NamedTuple):
    """The arrays of a batch on the device."""

    slots: jax.Array  # i32[T]
    positions: jax.Array  # i32[T]
    tokens: jax.Array  # i32[T]
    known: jax.Array  # i32[S, M * P], the batch's included
    sampling: jax.Array  # i32[S, F], the batch's included
    last: jax.Array | None  # i32[R]: the token after which each row samples; None in a decode step
    at: SamplePositions


def lay_out(
    model: StepModel, shape: Shape, state: DeviceState[jax.Array], field: Mapping[str, jax.Array]
) -> BatchLayout:
    known, rows, drafted, offsets = state.tokens, state.sampling, state.drafted, field.get("row_offset")
    row_slot = field["row_slot"]
    if shape.is_decode:
        slots, positions = row_slot, field["row_position"]
        if drafted is not None:
            positions = drafting.begin(drafted, slots, offsets)
        tokens = known.at[slots, positions].get(mode="clip")
        if drafted is not None and offsets is not None:
            tokens = drafting.with_drafts(drafted, tokens, slots, offsets)
            known = known.at[slots, positions].set(tokens, mode="drop")
        last, samples = None, row_slot < model.geometry.num_slots
    else:
        slots, positions = field["token_slot"], field["token_position"]
        is_on_device = jnp.arange(shape.tokens) < field["num_decodes"]
        if drafted is not None:
            positions = jnp.where(is_on_device, drafting.begin(drafted, slots, offsets), positions)
        tokens = jnp.where(is_on_device, known.at[slots, positions].get(mode="clip"), field["tokens"])
        if drafted is not None and offsets is not None:
            tokens = drafting.with_drafts(drafted, tokens, slots, offsets)
        known = known.at[slots, positions].set(tokens, mode="drop")
        rows = rows.at[row_slot].set(field["sampling"], mode="drop")
        last, samples = field["row_last"], field["row_samples"] > 0
    if drafted is None:
        ends = field["row_position"]
    else:
        ends = positions if last is None else positions.at[last].get(mode="clip")
    return BatchLayout(
        slots,
        positions,
        tokens,
        known,
        rows,
        last,
        SamplePositions(row_slot, ends, samples, offsets, field.get("row_drafts")),
    )


def _forward(
    model: StepModel,
    shape: Shape,
    keeps_hidden: bool,
    params: Params[jax.Array],
    state: DeviceState[jax.Array],
    field: Mapping[str, jax.Array],
    adapters: Sequence[Any],
) -> tuple[DeviceState[jax.Array], jax.Array, BatchLayout, Leaves]:
    """Return the next state, logits f32[R, Vx], the batch, and an EAGLE-3 head's hidden states."""
    spec, table = model.spec, field["table"]
    tables = state.tables.at[table[:, 0], table[:, 1]].set(table[:, 2], mode="drop")
    laid = lay_out(model, shape, state, field)
    kv, last = list(state.kv), laid.last
    context = make_context(model, shape, params, kv, tables, field, laid.slots, laid.positions, adapters)
    if state.media is not None and "token_media" in field:
        context = replace(context, media=(state.media, field["token_media"]))
    if "turned" in field:
        turned = field["turned"]
        context = replace(context, turned=turned if state.drafted is None else laid.positions + turned)
    if state.sources is not None:
        cross = cross_attention(spec, model.geometry, model.kernels, shape, kv, state.sources, laid.slots)
        context = replace(context, cross=cross)
    aux: Leaves = ()
    if model.layout.bounds:

        def context_of(own: Shape, kv: list[Any], field: Mapping[str, jax.Array]) -> decoder.Context:
            return make_context(model, own, params, kv, tables, field, field["slots"], field["positions"], adapters)

        x = decoder.embed(spec, params, laid.tokens, context)
        by_token = {**field, "slots": laid.slots, "positions": laid.positions}
        aux_layers = model.drafting.head.aux_layers if model.drafting is not None and model.drafting.head else ()
        x, aux = pipeline.run(model, shape, params, x, kv, by_token, context_of, aux_layers)
        hidden, last = pipeline.last_hidden(model, keeps_hidden, params, x, last)
    elif model.drafting is not None and model.drafting.head is not None:
        aux_layers = model.drafting.head.aux_layers
        hidden, aux = decoder.forward_with_aux(spec, params, laid.tokens, context, aux_layers)
    else:
        hidden = decoder.forward(spec, params, laid.tokens, context)  # [T, D]
    following = replace(state, kv=tuple(kv), tables=tables)
    return *read_out(model, shape, keeps_hidden, params, following, hidden, last, laid), laid, aux


def read_out(
    model: StepModel,
    shape: Shape,
    keeps_hidden: bool,
    params: Params[jax.Array],
    state: DeviceState[jax.Array],
    hidden: jax.Array,
    last: jax.Array | None,
    laid: BatchLayout,
) -> tuple[DeviceState[jax.Array], jax.Array]:
    """Return the next state, and logits f32[R, Vx] of hidden [T, D] at `last`, or of all."""
    kept = state.hidden
    if keeps_hidden:
        kept = lax.dynamic_update_slice(kept, hidden.astype(kept.dtype), (0, 0))
    sampled = hidden if last is None else hidden.at[last].get(mode="clip")
    logits = compute_logits(model, shape, params, sampled)  # [R, Vx]
    return replace(state, tokens=laid.known, sampling=laid.sampling, hidden=kept), logits


def make_context(
    model: StepModel,
    shape: Shape,
    params: Params[jax.Array],
    kv: list[Any],
    tables: jax.Array,
    field: Mapping[str, jax.Array],
    slots: jax.Array,
    positions: jax.Array,
    adapters: Sequence[Any],
) -> decoder.Context:
    spec, bias = model.spec, None
    if spec.relative_buckets:
        bias = layers.causal_bias(params.top["relative_bias"], spec.relative_buckets, spec.relative_distance)
    attend = attention(spec, model.geometry, model.kernels, shape, kv, tables, field, slots, positions, bias)
    context = decoder.Context(positions, attend, layout=model.layout, fused=fused.chosen(model.kernels))
    context = replace(context, rounds_inner=fused.rounds_inner(model.kernels, shape.tokens))
    if model.adapters is not None and adapters:
        linear = model.adapters.linear(adapters, field["token_adapter"])
        context = replace(context, linear=linear, fused=None)
    return context


def compute_logits(model: StepModel, shape: Shape, params: Params[jax.Array], hidden: jax.Array) -> jax.Array:
    """Return the logits of a step's places, f32[R, Vx].

    In deterministic mode products have equally many rows with and without drafts: bits depend on it.
    """
    if shape.is_decode or not shape.drafts:
        return decoder.head(model.spec, params, hidden)
    pieces = [
        decoder.head(model.spec, params, jnp.resize(hidden[start : start + shape.rows], (shape.rows, hidden.shape[1])))
        for start in range(0, len(hidden), shape.rows)
    ]
    return jnp.concatenate(pieces)[: len(hidden)]


def finish(
    model: StepModel,
    shape: Shape,
    variant: Variant,
    params: Params[jax.Array],
    state: DeviceState[jax.Array],
    field: Mapping[str, jax.Array],
    laid: BatchLayout,
    aux: Leaves,
    logits: jax.Array,
    mask: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[DeviceState[jax.Array], jax.Array]:
    """Sample and draft for the next step; return the next state and the results."""
    at, ends, drafted = laid.at, laid.at.positions + 1, state.drafted
    sampled = _sample(model, variant, state.tokens, state.sampling, state.extras, logits, at, ends, mask)
    if drafted is None or model.drafting is None:
        return replace(state, tokens=_append(model, state.tokens, at, ends, sampled)), join(sampled)
    with named_scope("verification"):
        counts, had = drafting.count(drafted, at, sampled)
        tokens, drafted = drafting.take_in(drafted, state.tokens, at, sampled, counts)
    joined = join(sampled)
    if shape.drafts:
        joined = jnp.concatenate([joined, counts[:, None], had[:, None]], axis=1)
    state = replace(state, tokens=tokens, drafted=drafted)
    with named_scope("drafting"):
        batch_of = draft_models.Batch(shape, field, laid.slots, laid.positions, laid.tokens, at, counts, aux)
        return replace(state, drafted=draft_models.draft(model, params, state, batch_of)), joined


def _append(model: StepModel, tokens: jax.Array, at: SamplePositions, ends: jax.Array, sampled: Sampled) -> jax.Array:
    with named_scope("sampling"):
        slots = jnp.where(at.samples, at.slots, model.geometry.num_slots)
        return tokens.at[slots, ends].set(sampled.tokens, mode="drop")


def _sample(
    model: StepModel,
    variant: Variant,
    tokens: jax.Array,
    sampling: jax.Array,
    extras: jax.Array,
    logits: jax.Array,
    at: SamplePositions,
    ends: jax.Array,
    mask: tuple[jax.Array, jax.Array] | None = None,
) -> Sampled:
    with named_scope("sampling"):
        here = sampler.unpack_rows(sampling.at[at.slots].get(mode="clip"))
        history, unpacked = None, None
        if variant is Variant.FULL:
            history = tokens.at[at.slots].get(mode="clip")
            unpacked = model.extras.unpack(extras.at[at.slots].get(mode="clip"))
        return sampler.sample(
            logits,
            here,
            ends,
            history,
            unpacked,
            variant,
            model.num_logprobs,
            Vocabulary(model.spec.vocab_size, model.layout),
            model.processors,
            model.kernels["sample"],
            mask,
        )
