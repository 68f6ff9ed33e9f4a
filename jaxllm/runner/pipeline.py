"""The layers of a step over pipeline stages (model/stages.py), for one device; traced inside the step.

In each tick every stage computes its layers and passes the residual stream to the next stage. Prompts are cut into M
micro-batches of B tokens, and stage s computes number t - s in tick t. A decode step is one micro-batch: fewer rows
would take as long. A stage without a micro-batch computes padding and writes no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, named_scope

from jaxllm.model import decoder, stages
from jaxllm.model.decoder import Context, Params
from jaxllm.model.sharding import PIPELINE
from jaxllm.runner.batch import Shape
from jaxllm.runner.step_model import StepModel
from jaxllm.setup.kv_cache import KvLayer

# Tokens for which products of an H100 take as long as reading their weights in 16 bits.
LEAST_TOKENS = 256
ContextOf = Callable[[Shape, list[KvLayer[jax.Array]], Mapping[str, jax.Array]], Context]


def microbatches(shape: Shape) -> int:
    return 1 if shape.is_decode else max(1, shape.tokens // LEAST_TOKENS)


def ticks(shape: Shape, num_stages: int) -> tuple[int, int]:
    """Return a program's stage-ticks with a micro-batch, and all."""
    count = microbatches(shape)
    return count * num_stages, (count + num_stages - 1) * num_stages


def run(
    model: StepModel,
    shape: Shape,
    params: Params[jax.Array],
    x: jax.Array,
    kv: list[KvLayer[jax.Array]],
    field: Mapping[str, jax.Array],
    context_of: ContextOf,
    aux_layers: Sequence[int] = (),
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Run all layers on x [T, D] and change `kv`; return the residual stream, and that before each of `aux_layers`.

    The first is valid on the last stage, see `from_stage`. The number of layers selects the stream after the last one.
    `field` has a batch's fields, "slots" and "positions", i32[T]; `context_of` makes a micro-batch's context from its
    shape and fields.
    """
    layout, num_slots = model.layout, model.geometry.num_slots
    count, num_stages, stage = microbatches(shape), layout.stages, lax.axis_index(PIPELINE)
    size = -(-shape.tokens // count)  # B
    own_shape = replace(shape, tokens=size, rows=min(shape.rows, size))
    by_token = {name: field[name] for name in ("slots", "positions", "token_adapter") if name in field} | {"x": x}
    pieces = {name: _pieces(of, count, size) for name, of in by_token.items()}

    aux_places = [stages.place_of(layer, layout) for layer in aux_layers]

    def tick(
        turn: jax.Array | int, arrived: jax.Array, kv: list[KvLayer[jax.Array]]
    ) -> tuple[jax.Array, list[jax.Array]]:
        number = turn - stage
        is_busy = (number >= 0) & (number < count)
        number = jnp.clip(number, 0, count - 1)
        own = {name: of[number] if count > 1 else of[0] for name, of in pieces.items()}
        y = jnp.where(stage == 0, own["x"], arrived)
        own["slots"] = jnp.where(is_busy, own["slots"], num_slots)
        context = context_of(own_shape, kv, own | _of_piece(field, number * size, size, is_busy, num_slots))
        before = run_stage_to(model, params, y, context, [place for _, place in aux_places])
        return before[max(before)], [before[place] for _, place in aux_places]

    if count == 1:  # CUDA graphs hold no loop
        y, aux = x, [x] * len(aux_layers)
        for turn in range(num_stages):
            y, found = tick(turn, passed_on(y, num_stages) if turn else y, kv)
            aux = [new if own == turn else old for (own, _), new, old in zip(aux_places, found, aux, strict=True)]
        return y, tuple(from_stage(old, own) for (own, _), old in zip(aux_places, aux, strict=True))

    def in_loop(carried: tuple[jax.Array, Any], turn: jax.Array) -> tuple[tuple[jax.Array, Any], Any]:
        arrived, own_kv = carried[0], list(carried[1])
        y, found = tick(turn, arrived, own_kv)
        return (passed_on(y, num_stages), tuple(own_kv)), (y, found)

    def of_stage(made: jax.Array, own: int) -> jax.Array:
        return made[own : own + count].reshape(-1, x.shape[1])[: len(x)]

    start = jnp.zeros((size, x.shape[1]), x.dtype), tuple(kv)
    (_, kv[:]), (made, found) = lax.scan(in_loop, start, jnp.arange(count + num_stages - 1))
    aux = [from_stage(of_stage(each, own), own) for (own, _), each in zip(aux_places, found, strict=True)]
    return of_stage(made, num_stages - 1), tuple(aux)


def run_stage(model: StepModel, params: Params[jax.Array], x: jax.Array, context: Context) -> jax.Array:
    """Run the layers of this device's stage on x [T, D]."""
    before = run_stage_to(model, params, x, context)
    return before[max(before)]


def run_stage_to(
    model: StepModel, params: Params[jax.Array], x: jax.Array, context: Context, places: Sequence[int] = ()
) -> dict[int, jax.Array]:
    """Run the layers of this device's stage; return the residual stream before some places, `places` among them."""
    ends, leading, stage = stages.ends(model.layout), model.layout.division.leading, lax.axis_index(PIPELINE)
    own_end = jnp.asarray(ends)[stage]
    done, before = 0, {0: x}
    for place in sorted({leading, *ends, *places} - {0}):
        further = decoder.run_layers(model.spec, params, x, context, done, place)
        if place <= leading:
            x = jnp.where(stage == 0, further, x)
        else:  # stages with fewer layers keep their result
            x = further if place <= ends[-1] else jnp.where(own_end >= place, further, x)
        done, before[place] = place, x
    return before


def passed_on(x: jax.Array, num_stages: int) -> jax.Array:
    with named_scope("next_stage"):
        return lax.ppermute(x, PIPELINE, [(before, before + 1) for before in range(num_stages - 1)])


def last_hidden(
    model: StepModel, keeps_all: bool, params: Params[jax.Array], x: jax.Array, last: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Return the last stage's hidden states on all stages, and the places in them to sample at, None: all."""
    if last is not None and not keeps_all:  # fewer rows to exchange
        x, last = x.at[last].get(mode="clip"), None
    return decoder.final_norm(model.spec, params, from_stage(x, model.layout.stages - 1)), last


def from_stage(x: jax.Array, own: int) -> jax.Array:
    with named_scope("all_stages"):
        return lax.psum(jnp.where(lax.axis_index(PIPELINE) == own, x, jnp.zeros_like(x)), PIPELINE)


def _pieces(x: jax.Array, count: int, size: int) -> jax.Array:
    """Return micro-batches [M, B, …] of [T, …], padded with the last element."""
    padding = [(0, count * size - len(x)), *[(0, 0)] * (x.ndim - 1)]
    return jnp.pad(x, padding, mode="edge").reshape(count, size, *x.shape[1:])


def _of_piece(
    field: Mapping[str, jax.Array], first: jax.Array, size: int, is_busy: jax.Array, num_slots: int
) -> dict[str, jax.Array]:
    """Return the number of decode rows, and tiles, of the tokens from `first`."""
    if "num_decodes" not in field:
        return {}
    found = {"num_decodes": jnp.where(is_busy, jnp.maximum(field["num_decodes"] - first, 0), 0)}
    start = jnp.maximum(field["tile_start"], first)  # i32[Y]
    length = jnp.minimum(field["tile_start"] + field["tile_length"], first + size) - start
    is_there = is_busy & (length > 0)
    found["tile_slot"] = jnp.where(is_there, field["tile_slot"], num_slots)
    found["tile_start"] = jnp.where(is_there, start - first, 0)
    found["tile_length"] = jnp.where(is_there, length, 0)
    found["tile_position"] = jnp.where(is_there, field["tile_position"] + start - field["tile_start"], 0)
    return found
