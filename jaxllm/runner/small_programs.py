"""The small programs of a runner, of one size: changes of the state before a step, and log-probabilities after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.runner import scoring, step, ticks
from jaxllm.runner.device_state import DeviceState
from jaxllm.runner.results import Scored
from jaxllm.runner.scoring import SCORED_ROWS
from jaxllm.runner.step_model import Leaves, StepModel
from jaxllm.setup.kv_cache import Geometry, leaves_by_group

PATCH_ENTRIES = 1024  # changes per call
PATCH_EXTRAS = 8  # requests per call: 26 kB each for a vocabulary of 152,000
COPIED_BLOCKS = 16  # per call: 1.5 times the most that ten forking beams need
COPY_PROGRAMS = ("copy_blocks", "copy_windowed_blocks")  # by group
Make = Callable[..., Any]  # (name, function, donated arguments, *descriptions) -> compiled program


def compile_all(model: StepModel, make: Make) -> dict[str, Any]:
    shapes, layout = model.state, model.layout

    def described(*size: int) -> jax.ShapeDtypeStruct:
        return layout.ranked(jax.ShapeDtypeStruct(size, jnp.int32, sharding=layout.sharding()))

    kv, params = (tuple(jax.tree.leaves(tree)) for tree in (shapes.kv, model.params))
    patch, build_copy = layout.on_each_rank(step.patch), step.build_copy
    if model.num_ticks > 1:
        patch, build_copy = ticks.build_patch(model), ticks.build_copy
    changes, extras = described(2, PATCH_ENTRIES, 3), described(PATCH_EXTRAS, 1 + model.extras.width)
    made = {
        "patch": make("patch", patch, (0, 1), shapes.tables, shapes.tokens, changes),
        "patch_extras": make("patch_extras", layout.on_each_rank(step.patch_extras), (0,), shapes.extras, extras),
    }
    for group, leaves in enumerate(leaves_by_group(model.spec, model.geometry, shapes.kv)):
        name = COPY_PROGRAMS[group]
        copied = tuple(kv[at] for at in leaves)
        made[name] = make(name, build_copy(layout, copied, name), (0,), copied, described(COPIED_BLOCKS, 2))
    for name, is_whole in (("score", False), ("score_whole", True)):
        made[name] = make(name, scoring.build(model, is_whole), (), params, shapes.hidden, described(SCORED_ROWS, 2))
    return made


class SmallPrograms:
    """Calls the programs of `compile_all`, or equivalent ones."""

    def __init__(
        self,
        programs: Mapping[str, Callable[..., Any]],
        shapes: DeviceState[Any],
        geometry: Geometry,
        kv: Sequence[Sequence[int]],
        vocab_size: int,
    ) -> None:
        """`shapes` describes the state; `kv` has each group's indices of KV leaves, see `leaves_by_group`."""
        self.programs = programs
        self._num_slots, self._num_extras = shapes.extras.shape
        self._num_tables = shapes.tables.shape[0]  # S, or those of all stages
        self._structure, self._kv = jax.tree.structure(shapes), kv
        self._geometry, self._vocab_size = geometry, vocab_size

    def patch(self, state: Leaves, table: np.ndarray, history: np.ndarray | None) -> Leaves:
        """Write block-table entries and tokens, each int32[·, 3] of slot, index and value."""
        parts = [table, np.zeros((0, 3), np.int32) if history is None else history]
        for start in range(0, max(map(len, parts)), PATCH_ENTRIES):
            changes = np.full((2, PATCH_ENTRIES, 3), self._num_tables, np.int32)
            for target, part in zip(changes, parts, strict=True):
                piece = part[start : start + PATCH_ENTRIES]
                target[: len(piece)] = piece
            whole = self._whole(state)
            tables, tokens = self.programs["patch"](whole.tables, whole.tokens, changes)
            state = tuple(jax.tree.leaves(replace(whole, tables=tables, tokens=tokens)))
        return state

    def patch_extras(self, state: Leaves, extras: Sequence[tuple[int, np.ndarray]]) -> Leaves:
        for start in range(0, len(extras), PATCH_EXTRAS):
            changes = np.full((PATCH_EXTRAS, 1 + self._num_extras), self._num_slots, np.int32)
            for target, (slot, packed) in zip(changes, extras[start : start + PATCH_EXTRAS], strict=False):
                target[0], target[1:] = slot, packed
            whole = self._whole(state)
            patched = self.programs["patch_extras"](whole.extras, changes)
            state = tuple(jax.tree.leaves(replace(whole, extras=patched)))
        return state

    def move(self, state: Leaves, moves: np.ndarray) -> Leaves:
        """Copy the blocks of `Plan.moves` that stay on the device."""
        moves = moves[moves[:, 1] == moves[:, 3]][:, [0, 2, 4]]
        leaves, num_stages = list(state), self._num_tables // self._num_slots
        for group, leaf_indices in enumerate(self._kv):
            copies = moves[moves[:, 0] == group, 1:]
            for start in range(0, len(copies), COPIED_BLOCKS):
                piece = copies[start : start + COPIED_BLOCKS]
                places = np.zeros((COPIED_BLOCKS, 2), np.int32)
                places[:, 1] = num_stages * self._geometry.array_blocks(group) + np.arange(COPIED_BLOCKS)
                places[: len(piece)] = piece
                copied = self.programs[COPY_PROGRAMS[group]](tuple(leaves[at] for at in leaf_indices), places)
                for at, leaf in zip(leaf_indices, copied, strict=True):
                    leaves[at] = leaf
        return tuple(leaves)

    def score(
        self, params: Leaves, state: Leaves, scored: Sequence[Scored]
    ) -> list[tuple[Sequence[Scored], jax.Array | np.ndarray]]:
        """Return the scores of positions in the dispatched step, in pieces of one kind, whole rows or not."""
        hidden = self._whole(state).hidden
        scores: list[tuple[Sequence[Scored], jax.Array | np.ndarray]] = []
        for name, is_whole in (("score", False), ("score_whole", True)):
            wanted = [each for each in scored if each.is_whole == is_whole]
            for start in range(0, len(wanted), SCORED_ROWS):
                piece = wanted[start : start + SCORED_ROWS]
                places = np.zeros((SCORED_ROWS, 2), np.int32)
                places[: len(piece)] = [(each.index, each.token) for each in piece]
                found = self.programs[name](params, hidden, places)
                # Wait: whole rows of a long prompt would exceed the device's memory.
                scores.append((piece, np.asarray(found)[:, : self._vocab_size] if is_whole else found))
        return scores

    def _whole(self, state: Leaves) -> DeviceState[jax.Array]:
        return jax.tree.unflatten(self._structure, state)
