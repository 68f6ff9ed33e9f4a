"""A runner of several ranks, each with a scheduler's plans and its part of the state; one program runs a plan of each.

The arrays of ranks are joined along their first axis (`Layout.ranked`). A rank without a plan computes padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import jax
import numpy as np

from jaxllm.runner import batch, device_state, results
from jaxllm.runner.compiled_programs import VARIANTS, ProgramKeys
from jaxllm.runner.model_runner import Flight, Runner, StepInFlight
from jaxllm.runner.profiling import span
from jaxllm.runner.results import Scored, StepOutput
from jaxllm.runner.scoring import SCORED_ROWS
from jaxllm.runner.small_programs import COPIED_BLOCKS, COPY_PROGRAMS, PATCH_ENTRIES, PATCH_EXTRAS, SmallPrograms
from jaxllm.runner.step_input import PackedStep, StepInput
from jaxllm.scheduler.state import NO_PLAN, Plan
from jaxllm.setup.kv_cache import leaves_by_group


@dataclass(slots=True)
class RankedStep:
    """A dispatched step of all ranks; held until it is sampled."""

    packed: Sequence[PackedStep]  # by rank
    way: ProgramKeys
    is_held: bool
    num_logprobs: int
    vocab_size: int
    logits: jax.Array | None = None
    joined: jax.Array | None = None
    # Positions by rank, and their scores, [D · SCORED_ROWS, W]; each of one kind.
    scores: list[tuple[Sequence[Sequence[Scored]], jax.Array | np.ndarray]] = field(default_factory=list)

    def result(self, rank: int) -> StepOutput:
        """Wait for the step and return a rank's part; raise its failure on the device."""
        assert self.joined is not None
        key, num_ranks = self.way[-1], len(self.packed)
        assert key.variant is not None
        joined = np.asarray(self.joined)
        joined = joined.reshape(num_ranks, len(joined) // num_ranks, *joined.shape[1:])[rank]
        scores: list[tuple[Sequence[Scored], np.ndarray]] = []
        for wanted, found in self.scores:
            own = np.asarray(found).reshape(num_ranks, SCORED_ROWS, -1)[rank]
            if wanted[rank]:
                scores.append((wanted[rank], own[:, : self.vocab_size] if wanted[rank][0].is_whole else own))
        width = results.result_width(key.variant, self.num_logprobs, False)
        plan = self.packed[rank].plan
        return StepInFlight(joined, plan, False, self.num_logprobs, width, scores).result()


@dataclass(slots=True)
class RankFlight:
    """A rank's part of a step, dispatched with the others'."""

    rank: int
    given: StepInput
    step: RankedStep | None = None

    def result(self) -> StepOutput:
        assert self.step is not None
        return self.step.result(self.rank)


class RankedRunner(Runner):
    """Runs a plan of each rank in one program."""

    _calls: Sequence[dict[str, list[np.ndarray]]] = ()  # of each rank's small programs, to be made together

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.num_ranks = self.setup.layout.ranks
        num_slots, shapes = self.geometry.num_slots, self._state_shapes
        kv = leaves_by_group(self.setup.stage_spec, self.geometry, shapes.kv)

        def places(*names: str) -> list[int]:
            return [device_state.leaf_index(shapes, name) for name in names]

        # The leaves that a program changes, and changes without an effect.
        self._changed = {"patch": places("tables", "tokens"), "patch_extras": places("extras")}
        self._nothing = {
            "patch": np.full((2, PATCH_ENTRIES, 3), num_slots, np.int32),
            "patch_extras": np.full((PATCH_EXTRAS, 1 + shapes.extras.shape[1]), num_slots, np.int32),
        }
        for group, leaves in enumerate(kv):
            copies = np.zeros((COPIED_BLOCKS, 2), np.int32)
            copies[:, 1] = self.geometry.array_blocks(group) + np.arange(COPIED_BLOCKS)
            self._changed[COPY_PROGRAMS[group]], self._nothing[COPY_PROGRAMS[group]] = leaves, copies
        self._calls = [{name: [] for name in self._changed} for _ in range(self.num_ranks)]
        self._of_ranks = [
            SmallPrograms(
                {name: partial(_collect, calls) for name, calls in own.items()},
                shapes,
                self.geometry,
                kv,
                self.setup.spec.vocab_size,
            )
            for own in self._calls
        ]

    def rank(self, number: int) -> Runner:
        """Return the runner of a rank's engine."""
        return cast(Runner, RankRunner(self, number))

    def dispatch(self, given: StepInput) -> Flight:
        """Raise RuntimeError: a step is of all ranks."""
        raise RuntimeError("use RankedEngine: a step is of all ranks")

    def dispatch_all(self, given: Sequence[StepInput | None]) -> RankedStep:
        """Dispatch a step with the input of each rank, without waiting.

        If one is held, the step is; then `sample_all` must precede the next step.
        """
        with self._compilations_counted():
            with span("pack"):
                step = self._pack_all(given)
            with span("dispatch"):
                self._run_all(step)
        if len(step.way) > 1 and not step.is_held:
            self.sample_all(step, [None] * self.num_ranks)
        return step

    def _pack_all(self, given: Sequence[StepInput | None]) -> RankedStep:
        some = [each for each in given if each is not None]
        size = batch.Extent(*map(max, zip(*(batch.extent(each.plan) for each in some), strict=True)))
        variant = max((each.variant for each in some), key=VARIANTS.index)
        is_held = any(each.is_held for each in some)
        way = self.programs.choose_for(size, variant, is_held)
        idle = StepInput(NO_PLAN, some[0].sampling)
        packed = [self.pack_for(way, each or idle) for each in given]
        return RankedStep(packed, way, is_held, self.num_logprobs, self.setup.spec.vocab_size)

    def _run_all(self, step: RankedStep) -> None:
        key, packed = step.way[0], step.packed
        for small, own in zip(self._of_ranks, packed, strict=True):
            if len(own.table) or own.tokens is not None:
                small.patch(self._state, own.table, own.tokens)
            if own.extras:
                small.patch_extras(self._state, own.extras)
            if len(own.plan.moves):
                small.move(self._state, own.plan.moves)
        self._apply()
        buffers = np.concatenate([own.buffer for own in packed])
        self._state, returned = self.programs[key](self._params, self._state, buffers)
        if len(step.way) > 1:
            step.logits = returned
        else:
            step.joined = returned
            returned.copy_to_host_async()
        step.scores = self._score([own.scored for own in packed])
        self.metrics.steps += 1
        self.metrics.padded_tokens += self.num_ranks * key.shape.tokens
        self.metrics.computed_tokens += sum(own.plan.num_tokens for own in packed)

    def sample_all(self, step: RankedStep, masks: Sequence[tuple[np.ndarray, np.ndarray] | None]) -> None:
        """Dispatch the second half of a step; `masks` of each rank as in `sample`, None: no row has one."""
        key, num_words, num_slots = step.way[1], -(-self.setup.spec.vocab_size // 32), self.geometry.num_slots
        packed = []
        for own, given in zip(step.packed, masks, strict=True):
            num_rows = len(own.plan.slots)
            words, is_masked = given or (np.zeros((num_rows, num_words), np.int32), np.zeros(num_rows, np.bool_))
            packed.append(batch.pack_masks(own.plan, key.shape.sampled, num_slots, words, is_masked))
        with self._compilations_counted(), span("dispatch"):
            leaves, (tokens_at, *others) = list(self._state), self._sampled_leaves
            arrays = [leaves[at] for at in (tokens_at, *others)]
            leaves[tokens_at], joined = self.programs[key](*arrays, step.logits, np.concatenate(packed))
            self._state = tuple(leaves)
            joined.copy_to_host_async()
        step.joined = joined
        step.logits, step.is_held = None, False

    def move_of(self, rank: int, plan: Plan) -> None:
        """Dispatch the moves of a rank's plan without rows."""
        self._of_ranks[rank].move(self._state, plan.moves)
        self._apply()

    def renew(self) -> None:
        for calls in self._calls:
            for own in calls.values():
                own.clear()
        super().renew()

    def _apply(self) -> None:
        """Dispatch the collected changes of all ranks."""
        for name, nothing in self._nothing.items():
            for parts in zip_longest(*(calls[name] for calls in self._calls), fillvalue=nothing):
                leaves, at = list(self._state), self._changed[name]
                changed = tuple(leaves[index] for index in at)
                arguments = (changed,) if name in COPY_PROGRAMS else changed
                changes = self._small.programs[name](*arguments, np.concatenate(parts))
                for index, leaf in zip(at, jax.tree.leaves(changes), strict=True):
                    leaves[index] = leaf
                self._state = tuple(leaves)
            for calls in self._calls:
                calls[name].clear()

    def _score(
        self, scored: Sequence[Sequence[Scored]]
    ) -> list[tuple[Sequence[Sequence[Scored]], jax.Array | np.ndarray]]:
        """Return the scores of positions, as `SmallPrograms.score`."""
        scores = []
        hidden = self._state[device_state.leaf_index(self._state_shapes, "hidden")]
        for name, is_whole in (("score", False), ("score_whole", True)):
            wanted = [[each for each in own if each.is_whole == is_whole] for own in scored]
            for start in range(0, max(map(len, wanted)), SCORED_ROWS):
                pieces = [own[start : start + SCORED_ROWS] for own in wanted]
                places = np.zeros((self.num_ranks, SCORED_ROWS, 2), np.int32)
                for place, piece in zip(places, pieces, strict=True):
                    if piece:
                        place[: len(piece)] = [(each.index, each.token) for each in piece]
                found = self._small.programs[name](self._params, hidden, places.reshape(-1, 2))
                scores.append((pieces, np.asarray(found) if is_whole else found))
        return scores


class RankRunner:
    """The runner of one rank's engine: that of all ranks, with steps that wait for `dispatch_all`."""

    def __init__(self, joint: RankedRunner, number: int) -> None:
        self._joint, self._number = joint, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._joint, name)

    def dispatch(self, given: StepInput) -> Any:
        return RankFlight(self._number, given)

    def move(self, plan: Plan) -> None:
        self._joint.move_of(self._number, plan)

    def renew(self) -> None:
        """Raise RuntimeError: the state is of all ranks."""
        raise RuntimeError("the state is of all ranks")

    def close(self) -> None:
        """Do nothing: the ranks' runner is closed."""


def _collect(calls: list[np.ndarray], *arguments: Any) -> Any:
    calls.append(arguments[-1])
    return arguments[0] if len(arguments) == 2 else arguments[:-1]
