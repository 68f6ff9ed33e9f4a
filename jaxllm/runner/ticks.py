"""Programs of one tick with batches in flight (scheduler/in_flight.py), and the host's side of the pipeline.

In a tick stage s computes its layers for the batch of s ticks ago; the newest is embedded, the oldest is sampled. A
buffer has all batches, the newest first, in the layout of one shape. Each stage writes the block-table entries of its
own batch, and tokens and parameters are written when their batch is sampled, so each batch sees its plan's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from jaxllm.model import decoder
from jaxllm.model.decoder import Params
from jaxllm.model.sharding import PIPELINE, Layout
from jaxllm.runner import batch, pipeline, step
from jaxllm.runner.batch import Extent, Shape
from jaxllm.runner.compiled_programs import ProgramKeys
from jaxllm.runner.device_state import DeviceState
from jaxllm.runner.step import BatchLayout
from jaxllm.runner.step_input import PackedStep, StepInput
from jaxllm.runner.step_model import Leaves, StepModel
from jaxllm.sampling.sampler import ROW_WIDTH, Variant
from jaxllm.scheduler.state import NO_PLAN, Plan


def build(model: StepModel, shape: Shape, variant: Variant) -> Callable[..., tuple[Leaves, jax.Array]]:
    """Return a tick as `step.build` returns a step; the results are those of the oldest batch."""

    def run(
        weights: Params[jax.Array], state: DeviceState[jax.Array], buffer: jax.Array
    ) -> tuple[DeviceState[jax.Array], jax.Array]:
        state, logits, laid, fields = _forward(model, shape, variant is Variant.FULL, weights, state, buffer)
        following, joined = step.finish(model, shape, variant, weights, state, fields, laid, (), logits)
        return following, step.into(state, buffer, joined)

    return step.on_shards(model, run, step.program_name(shape, variant), model.layout.spec())


def build_forward(model: StepModel, shape: Shape) -> Callable[..., tuple[Leaves, jax.Array]]:
    """Return a tick without sampling, as `step.build_forward`."""

    def run(
        weights: Params[jax.Array], state: DeviceState[jax.Array], buffer: jax.Array
    ) -> tuple[DeviceState[jax.Array], jax.Array]:
        return _forward(model, shape, True, weights, state, buffer)[:2]

    return step.on_shards(model, run, step.program_name(shape, None), model.layout.spec(None, "vocab"))


def _forward(
    model: StepModel,
    shape: Shape,
    keeps_hidden: bool,
    params: Params[jax.Array],
    state: DeviceState[jax.Array],
    buffer: jax.Array,
) -> tuple[DeviceState[jax.Array], jax.Array, BatchLayout, Mapping[str, jax.Array]]:
    """Return the next state, and the oldest batch's logits f32[R, Vx], layout and fields."""
    spec, stage, num_ticks = model.spec, lax.axis_index(PIPELINE), model.num_ticks
    state, buffer = step.keep(state, buffer, batch.sent_size(shape, num_ticks))
    size, table = batch.stride(shape), batch.fields(shape)
    newest, own, oldest = (
        step.fields_of(table, lax.dynamic_slice_in_dim(buffer, at * size, size)) for at in (0, stage, num_ticks - 1)
    )
    new, laid = (step.lay_out(model, shape, state, fields) for fields in (newest, oldest))
    names = ("row_slot", "row_position") if shape.is_decode else ("token_slot", "token_position")
    slots, positions = (own[name] for name in names)
    entries, kv = own["table"], list(state.kv)
    tables = state.tables.at[entries[:, 0], entries[:, 1]].set(entries[:, 2], mode="drop")
    context = step.make_context(model, shape, params, kv, tables, own, slots, positions, ())
    x = decoder.embed(spec, params, new.tokens, replace(context, positions=new.positions))
    assert state.passing is not None
    x = pipeline.run_stage(model, params, jnp.where(stage == 0, x, state.passing[: len(x)]), context)
    passing = lax.dynamic_update_slice(state.passing, pipeline.passed_on(x, num_ticks), (0, 0))
    state = replace(state, kv=tuple(kv), tables=tables, passing=passing)
    hidden, last = pipeline.last_hidden(model, keeps_hidden, params, x, laid.last)
    state, logits = step.read_out(model, shape, keeps_hidden, params, state, hidden, last, laid)
    return state, logits, laid, oldest


@dataclass(slots=True)
class Ticks:
    """The batches in flight, the newest first."""

    count: int  # of stages
    num_slots: int
    num_blocks: Sequence[int]  # of a stage's arrays, by group
    steps: list[StepInput] = field(default_factory=list)
    _packed: list[tuple[Shape, PackedStep] | None] = field(default_factory=list)  # of `steps`

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the batches; their blocks are in no cache."""
        self.steps = [StepInput(NO_PLAN, np.zeros((1, ROW_WIDTH), np.int32), variant=Variant.GREEDY)] * self.count
        self._packed = [None] * self.count

    @property
    def carried(self) -> Plan | None:
        """The newest plan with work that has not left."""
        plans = [each.plan for each in self.steps[:-1]]
        return next((plan for plan in plans if len(plan.slots) or len(plan.table) or len(plan.moves)), None)

    def enter(self, given: StepInput) -> StepInput:
        """Begin a tick with a new batch, or one without rows; return the batch that leaves."""
        self.steps, self._packed = [given, *self.steps[:-1]], [None, *self._packed[:-1]]
        return self.steps[-1]

    def extent(self) -> Extent:
        """Return the sizes of a shape that holds every batch."""
        sizes = [batch.extent(each.plan) for each in self.steps]
        return Extent(*(max(getattr(size, name) for size in sizes) for name in ("tokens", "rows", "tiles")))

    def join(self, way: ProgramKeys, pack: Callable[[ProgramKeys, StepInput], PackedStep]) -> PackedStep:
        """Return the tick of these programs as one step, which returns the oldest batch's results.

        Slots of block tables, and blocks of moves, are numbered over all stages. Known tokens are written when their
        batch enters, for its first token, and again before it is sampled: a row that was dropped since may have
        overwritten them.
        """
        shape, packed = way[0].shape, list[PackedStep]()
        for at, (given, own) in enumerate(zip(self.steps, self._packed, strict=True)):
            if own is None or own[0] is not shape:
                own = self._packed[at] = shape, pack(way, given)
            packed.append(own[1])
        buffer = np.zeros(batch.sent_size(shape, self.count), np.int32)
        for at, each in enumerate(packed):
            start = at * batch.stride(shape)
            buffer[start : start + batch.buffer_size(shape)] = each.buffer[: batch.buffer_size(shape)]
        oldest = packed[-1]
        tokens = [each.tokens for each in (packed[0], oldest) if each.tokens is not None]
        return replace(
            oldest,
            way=way,
            buffer=buffer,
            table=np.concatenate([each.table + self._first_slot(at) for at, each in enumerate(packed)]),
            tokens=np.concatenate(tokens) if tokens else None,
            moves=np.concatenate([self._of_stage(each.moves, at) for at, each in enumerate(packed)]),
        )

    def _first_slot(self, stage: int) -> np.ndarray:
        return np.array((stage * self.num_slots, 0, 0), np.int32)

    def _of_stage(self, moves: np.ndarray, stage: int) -> np.ndarray:
        first = stage * np.asarray(self.num_blocks, np.int32)[moves[:, 0]]
        return moves + first[:, None] * np.array((0, 0, 1, 0, 1), np.int32)


def of_stage(numbers: jax.Array, size: int) -> jax.Array:
    """Return the stage's own of numbers over all stages, each with `size`; `size` or more for others'."""
    own = numbers - lax.axis_index(PIPELINE) * size
    return jnp.where((own >= 0) & (own < size), own, size + jnp.arange(len(own)))


def build_copy(layout: Layout, kv: Sequence[jax.ShapeDtypeStruct], name: str) -> Callable[[Leaves, jax.Array], Leaves]:
    """Return a function as `step.build_copy`, for blocks of all stages."""
    specs: Any = tuple(leaf.sharding.spec for leaf in kv)  # pyright: ignore[reportOptionalMemberAccess]
    num_blocks = kv[0].shape[0] // layout.stages

    def on_shard(leaves: Leaves, copies: jax.Array) -> Leaves:
        sources, targets = (of_stage(copies[:, column], num_blocks) for column in (0, 1))
        sources = jnp.minimum(sources, num_blocks - 1)
        copy = partial(pallas_kernels.copy_blocks, sources=sources, targets=targets)
        return tuple(copy(leaf, None)[0] for leaf in leaves)

    on_shard.__name__ = name
    return layout.shard_map(on_shard, (specs, layout.spec()), specs)


def build_patch(model: StepModel) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return `step.patch` for block tables of all stages."""
    num_slots = model.geometry.num_slots

    def on_shard(tables: jax.Array, tokens: jax.Array, changes: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = changes[0].at[:, 0].set(of_stage(changes[0, :, 0], num_slots))
        return step.patch(tables, tokens, jnp.stack([own, changes[1]]))

    specs: Any = model.state.tables.sharding.spec, model.layout.spec()
    return model.layout.shard_map(on_shard, (*specs, model.layout.spec()), specs)
