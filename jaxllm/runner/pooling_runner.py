"""The runner of a pooling model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.model.pooler import Pooler
from jaxllm.runner import batch, encoder_batch, pooling
from jaxllm.runner.compiled_programs import Key
from jaxllm.runner.model_runner import Runner
from jaxllm.runner.pooling import PoolPrograms
from jaxllm.runner.profiling import span
from jaxllm.runner.results import StepOutput
from jaxllm.runner.small_programs import PATCH_ENTRIES
from jaxllm.runner.step_input import StepInput
from jaxllm.scheduler.state import Limits


class PooledInFlight(NamedTuple):
    """A dispatched step."""

    rows: jax.Array  # float32[·, W]
    num_rows: int

    def result(self) -> StepOutput:
        pooled = np.asarray(self.rows)[: self.num_rows]
        tokens, is_finite = np.zeros(self.num_rows, np.int32), np.asarray(np.isfinite(pooled).all(axis=1))
        return StepOutput(tokens, is_finite, side={"pooled": pooled})


class PoolingRunner(Runner):
    """Runs plans of prompts. Not thread-safe: one thread calls `dispatch`."""

    programs: PoolPrograms  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def limits(self) -> Limits:
        whole = not self.setup.spec.is_causal
        limits = super().limits
        return replace(limits, whole_prompts=True, max_step_chunks=limits.num_slots) if whole else limits

    def dispatch(self, given: StepInput) -> PooledInFlight:
        """Dispatch one step as `Runner.dispatch`; `given.side` has "token_types", by row int32[·] or None (zeros)."""
        plan, prompts, token_types = given.plan, given.chunks, given.side["token_types"]
        with self._compilations_counted():
            with span("pack"):
                key = self.programs.choose(plan)
                if key.shape.bin_tokens:
                    buffer = encoder_batch.pack(plan, key.shape, prompts, token_types)
                else:
                    nothing = np.zeros((self.geometry.num_slots, key.shape.sampling_fields), np.int32)
                    buffer = batch.pack(plan, key.shape, self.geometry.num_slots, prompts, nothing)
            with span("dispatch"):
                if not key.shape.bin_tokens:
                    self._patch_tables(plan.table[key.shape.entries :])
                self._state, rows = self.programs[key](self._params, self._state, buffer)
                rows.copy_to_host_async()
        self.metrics.steps += 1
        self.metrics.padded_tokens += key.shape.tokens
        self.metrics.computed_tokens += plan.num_tokens
        return PooledInFlight(rows, len(plan.slots))

    def _describe_state(self) -> Any:
        setup = self.setup
        assert isinstance(setup.head, Pooler)
        return pooling.abstract(setup.spec, setup.head, self.geometry, setup.layout, setup.cache_dtype)

    def _list_programs(self) -> PoolPrograms:  # pyright: ignore[reportIncompatibleMethodOverride]
        setup, slots = self.setup, self.geometry.num_slots
        if setup.spec.is_causal:
            made = batch.ragged_shapes(setup.max_num_batched_tokens, slots, self.geometry.block_size, 1, setup.platform)
        else:
            made = encoder_batch.shapes(setup.max_num_batched_tokens, slots, self.geometry.max_model_len)
        return PoolPrograms(made, self._lower, self.metrics)

    def _compile_small(self) -> None:
        if not self.setup.spec.is_causal:
            return
        changes = jax.ShapeDtypeStruct((PATCH_ENTRIES, 3), jnp.int32, sharding=self.setup.layout.sharding())
        described = self._state_shapes.tables, changes
        patch = jax.jit(_patch, donate_argnums=0)
        self._patch_program = self._kept.make("patch", described, lambda: patch.lower(*described))

    def _lower(self, key: Key) -> jax.stages.Lowered:
        table = encoder_batch.fields(key.shape) if key.shape.bin_tokens else batch.fields(key.shape)
        everywhere = self.setup.layout.sharding()
        buffer = jax.ShapeDtypeStruct((batch.size_of(table),), jnp.int32, sharding=everywhere)
        params, state = (tuple(jax.tree.leaves(tree)) for tree in (self._params_shapes, self._state_shapes))
        run = pooling.build(self._step_model, key.shape)
        return jax.jit(run, donate_argnums=(1,), compiler_options=self._options).lower(params, state, buffer)

    def _patch_tables(self, table: np.ndarray) -> None:
        for start in range(0, len(table), PATCH_ENTRIES):
            changes = np.full((PATCH_ENTRIES, 3), self.geometry.num_slots, np.int32)
            piece = table[start : start + PATCH_ENTRIES]
            changes[: len(piece)] = piece
            state = jax.tree.unflatten(jax.tree.structure(self._state_shapes), self._state)
            tables = self._patch_program(state.tables, changes)
            self._state = tuple(jax.tree.leaves(state.replace(tables=tables)))


def _patch(tables: jax.Array, changes: jax.Array) -> jax.Array:
    return tables.at[changes[:, 0], changes[:, 1]].set(changes[:, 2], mode="drop")
