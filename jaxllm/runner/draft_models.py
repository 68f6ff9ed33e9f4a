"""Drafts by a small decoder or an EAGLE-3 head, with a cache in the blocks of the target.

Every step updates that cache, overwriting rejected drafts. Drafts use the request's temperature and noise, which
maximizes acceptance. Placeholders of images and sounds are read as tokens. Traced inside the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.model import decoder, eagle, fused
from jaxllm.model.decoder import Params
from jaxllm.runner import drafting
from jaxllm.runner.attention import attention
from jaxllm.runner.batch import Shape
from jaxllm.runner.device_state import DeviceState
from jaxllm.runner.drafting import Drafted, SamplePositions
from jaxllm.runner.step_model import StepModel
from jaxllm.sampling import sampler
from jaxllm.sampling.sampler import SamplingRows, Variant
from jaxllm.sampling.vocab_parallel import Vocabulary
from jaxllm.setup.draft_setup import Drafting


class Batch(NamedTuple):
    """A sampled step."""

    shape: Shape
    field: Mapping[str, jax.Array]
    slots: jax.Array  # i32[T]
    positions: jax.Array  # i32[T]
    tokens: jax.Array  # i32[T]
    at: SamplePositions
    counts: jax.Array  # i32[·]: yielded tokens, at a row's first place
    aux: tuple[jax.Array, ...]  # the target's hidden states, [T, D] each


def keep(drafted: Drafted[jax.Array], aux: tuple[jax.Array, ...]) -> Drafted[jax.Array]:
    kept = tuple(
        lax.dynamic_update_slice(place, states.astype(place.dtype), (0, 0))
        for place, states in zip(drafted.aux, aux, strict=True)
    )
    return replace(drafted, aux=kept)


def draft(
    model: StepModel, params: Params[jax.Array], state: DeviceState[jax.Array], batch: Batch
) -> Drafted[jax.Array]:
    """Update the draft model's cache for a step; return the drafts, new ones if the program drafts."""
    how, drafted, shape = model.drafting, state.drafted, batch.shape
    assert how is not None and drafted is not None
    passes = None
    if how.head is not None:
        passes = _HeadPasses(model, how, params, state, batch)
    elif how.spec is not None:
        passes = _DecoderPasses(model, how, params, state, batch)
    if not shape.drafts:
        return drafted if passes is None else replace(drafted, kv=tuple(passes.kv))
    rows, slots = drafting.sequences(batch.at, shape.rows, model.geometry.num_slots)
    lengths = drafted.lengths.at[slots].get(mode="clip")
    if passes is None:
        drafts = drafting.look_up(state.tokens.at[slots].get(mode="clip"), lengths, how)
    else:
        here = sampler.unpack_rows(state.sampling.at[slots].get(mode="clip"))
        capacity = batch.field["row_capacity"].at[rows].get(mode="clip")
        logits = passes.begin(rows, slots, lengths)
        chosen = [_choose(model, logits, here, lengths)]
        for place in range(1, how.most):
            # Mask rows beyond their slot's blocks, which belong to other requests.
            is_inside = lengths + place <= capacity
            logits = passes.go_on(jnp.where(is_inside, slots, model.geometry.num_slots), lengths + place, chosen[-1])
            chosen.append(_choose(model, logits, here, lengths + place))
        drafts = jnp.stack(chosen, axis=1)
        drafted = replace(drafted, kv=tuple(passes.kv))
    return replace(drafted, tokens=drafted.tokens.at[slots].set(drafts, mode="drop"))


def _choose(model: StepModel, logits: jax.Array, here: SamplingRows, ends: jax.Array) -> jax.Array:
    """Return drafts for position `ends` of each row, i32[R]."""
    vocabulary, kernel = Vocabulary(model.spec.vocab_size, model.layout), model.kernels["sample"]
    return sampler.sample(logits, here, ends, None, None, Variant.RANDOM, 0, vocabulary, (), kernel).tokens


class _Passes:
    def __init__(
        self, model: StepModel, how: Drafting, params: Params[jax.Array], state: DeviceState[jax.Array], batch: Batch
    ) -> None:
        assert state.drafted is not None and how.spec is not None
        self.kv = list(state.drafted.kv)
        self._model, self._how, self._target, self._state, self._own = model, how, params, state, batch
        self._spec, self._params = how.spec, params.draft
        # Differences of rotary positions from positions, i32[axes, T], and of rows, i32[1, R].
        self._shifts = batch.field.get("turned") if how.spec.has_axes else None
        self._row_shifts: jax.Array | None = None

    def _context(
        self, shape: Shape, slots: jax.Array, positions: jax.Array, shifts: jax.Array | None
    ) -> decoder.Context:
        tables, field = self._state.tables, self._own.field
        geometry = self._model.geometry
        if geometry.num_groups > 1:
            geometry, tables = geometry.of_group(0), tables[:, :: geometry.num_groups]
        attend = attention(self._spec, geometry, self._how.kernels, shape, self.kv, tables, field, slots, positions)
        chosen = fused.chosen(self._how.kernels)
        turned = None if shifts is None else positions + shifts
        return decoder.Context(positions, attend, layout=self._model.layout, fused=chosen, turned=turned)

    def _one_each(self, slots: jax.Array, positions: jax.Array) -> decoder.Context:
        count, shifts = len(slots), self._row_shifts
        shape = Shape(tokens=count, rows=count, tiles=0, entries=0, sampling_fields=0)
        return self._context(shape, slots, positions, None if shifts is None else jnp.resize(shifts, (1, count)))

    def _whole_step(self) -> decoder.Context:
        own = self._own
        return self._context(replace(own.shape, looks_ahead=False), own.slots, own.positions, self._shifts)

    def _enter_rows(self, rows: jax.Array) -> None:
        if self._shifts is not None:
            self._row_shifts = self._shifts.at[:1, rows].get(mode="clip")


class _DecoderPasses(_Passes):
    def __init__(
        self, model: StepModel, how: Drafting, params: Params[jax.Array], state: DeviceState[jax.Array], batch: Batch
    ) -> None:
        super().__init__(model, how, params, state, batch)
        if not (batch.shape.is_decode and batch.shape.drafts):  # else `begin` computes the missing tokens
            decoder.forward(self._spec, self._params, batch.tokens, self._whole_step())

    def begin(self, rows: jax.Array, slots: jax.Array, lengths: jax.Array) -> jax.Array:
        """Return logits after each sequence's last token, f32[R, Vx]. The last accepted draft was never an input."""
        self._enter_rows(rows)
        slots, positions = jnp.concatenate([slots, slots]), jnp.concatenate([lengths - 2, lengths - 1])
        tokens = self._state.tokens.at[slots, positions].get(mode="clip")
        hidden = decoder.forward(self._spec, self._params, tokens, self._one_each(slots, positions))
        return decoder.head(self._spec, self._params, hidden[len(rows) :])

    def go_on(self, slots: jax.Array, ends: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return logits for position `ends`, f32[R, Vx]."""
        hidden = decoder.forward(self._spec, self._params, tokens, self._one_each(slots, ends - 1))
        return decoder.head(self._spec, self._params, hidden)


class _HeadPasses(_Passes):
    def __init__(
        self, model: StepModel, how: Drafting, params: Params[jax.Array], state: DeviceState[jax.Array], batch: Batch
    ) -> None:
        super().__init__(model, how, params, state, batch)
        assert how.head is not None
        self._head = how.head
        # The head reads a token's embedding with the previous token's hidden state.
        following = state.tokens.at[batch.slots, batch.positions + 1].get(mode="clip")
        fused = eagle.fuse(self._head, self._params, batch.aux)
        self._hidden, self._normed = self._run(following, fused, self._whole_step())

    def begin(self, rows: jax.Array, slots: jax.Array, lengths: jax.Array) -> jax.Array:
        self._enter_rows(rows)
        own = self._own
        last = rows + own.counts.at[rows].get(mode="clip") - 1
        self._hidden = self._hidden.at[last].get(mode="clip")
        return eagle.logits(self._head, self._params, self._normed.at[last].get(mode="clip"), self._model.layout)

    def go_on(self, slots: jax.Array, ends: jax.Array, tokens: jax.Array) -> jax.Array:
        self._hidden, normed = self._run(tokens, self._hidden, self._one_each(slots, ends - 2))
        return eagle.logits(self._head, self._params, normed, self._model.layout)

    def _run(self, tokens: jax.Array, hidden: jax.Array, context: decoder.Context) -> tuple[jax.Array, jax.Array]:
        embedded = eagle.embed(self._head, self._params, self._target, tokens, context)
        return eagle.forward(self._head, self._params, embedded, hidden, context)
