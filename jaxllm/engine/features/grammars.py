"""Structured output: token masks of grammars, and tokens that a grammar forces.

A row whose mask misses the time limit is late: it yields no token and is recomputed. R rows, W words of a
mask, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from jaxllm.engine.accepted import Accepted
from jaxllm.engine.features.feature import Core, Feature, Masks, Yielded
from jaxllm.engine.input_batch import blaming
from jaxllm.engine.sequence import Sequence, SequenceGroup
from jaxllm.runner.results import StepOutput
from jaxllm.runner.step_input import StepInput
from jaxllm.sampling.sampler import Variant
from jaxllm.scheduler import scheduler
from jaxllm.scheduler.state import Events, Plan
from jaxllm.structured_output.constraint import Constraint
from jaxllm.structured_output.grammars import Grammar, Grammars
from jaxllm.structured_output.slow_masks import SlowMasks
from jaxllm.structured_outputs_params import StructuredOutputsParams

_log = logging.getLogger(__name__)
LEAST_FORCED = 2  # fewer are not worth discarding the row in flight
# Forced tokens per row that are worth a step of chunks: 65 ms with 32 rows on two cores, not 36 ms. Fewer are sampled.
FORCED_PER_ROW = 0.5
# Time limit for the tokens that grammars consume in a step, 1 to 20 us each (5 ms if slow); other threads take the
# rest.
CONSUME_SECONDS = 0.02
# Time limit for a step's masks; other threads make those of expensive grammars. With 126 such outputs on two cores, a
# stream has 0.05 to 0.12 s between tokens at the median, at most 0.5 s.
MASK_SECONDS = 0.05


class GrammarRows(Feature):
    """Constrains sequences by grammars. A request's state is one constraint per sequence."""

    name = "grammars"
    sends = (StructuredOutputsParams,)

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._batch = core.batch
        self._num_words = -(-core.language.model.vocab_size // 32)
        self._is_constrained = np.zeros(core.runner.limits.num_slots, np.bool_)  # by slot
        self._slow = SlowMasks()
        self._late: tuple[int, list[int]] = (0, [])

    def accept(self, accepted: Accepted) -> None:
        asked = accepted.params.structured_outputs
        if asked is None:
            return
        accepted.states[self.name] = accepted.language.grammars.compile(asked)
        accepted.packed = replace(accepted.params, min_tokens=0)  # the masks enforce it

    def begin(self, accepted: Accepted, group: SequenceGroup) -> None:
        grammar: Grammar | None = accepted.states.get(self.name)
        if grammar is None:
            return
        group.states[self.name] = [grammar.begin() for _ in group.sequences]
        for sequence in group.sequences:  # even with `ignore_eos`: masks allow an end only if nothing else may follow
            sequence.eos_ids = group.language.model.eos_ids

    def schedule(self, sequence: Sequence, fields: dict[str, Any]) -> None:
        """Disable drafts: a mask depends on the previous token."""
        if self.name in sequence.group.states:
            fields["may_draft"] = False

    def place(self, slot: int, sequence: Sequence) -> None:
        self._is_constrained[slot] = self.name in sequence.group.states

    def inputs(self, step: StepInput) -> None:
        step.is_held |= bool((self._is_constrained[step.plan.slots] & step.plan.samples).any())

    def read(self, plan: Plan, result: StepOutput, yielded: Yielded) -> None:
        """Let grammars consume the sampled tokens; rows may also yield the tokens that these force next."""
        constrained = self._is_constrained[plan.slots]
        if not constrained.any():
            return
        late = self._late[1] if self._late[0] == plan.number else []
        is_live = scheduler.is_live(self.core.scheduler.state, plan)
        rows = (constrained & result.is_finite & is_live).nonzero()[0].tolist()
        owners = {row: self._batch.owner(int(plan.slots[row])) for row in rows if row not in late}
        given = self._sampled_again(owners, result.tokens)
        others = {row: sequence for row, sequence in owners.items() if row not in given}
        found, dropped = self._advance_all(others, result.tokens)
        worth = sum(map(len, found.values())) >= FORCED_PER_ROW * len(plan.slots)
        # Bans could forbid sampling forced tokens.
        several = {
            row: forced for row, forced in found.items() if forced and (worth or owners[row].variant is Variant.FULL)
        }
        given |= {row: forced for row, forced in several.items() if self._take(owners[row], forced)}
        late = [*late, *dropped]
        if not given and not late:
            return
        counts = np.ones(len(plan.slots), np.int32)
        counts[late] = 0
        tokens = np.zeros((len(plan.slots), 1 + max(map(len, given.values()), default=0)), np.int32)
        tokens[:, 0] = result.tokens
        for row, forced in given.items():
            counts[row] += len(forced)
            tokens[row, 1 : counts[row]] = forced
        yielded.tokens, yielded.counts = tokens, counts

    def take_in(self, plan: Plan, result: StepOutput, events: Events) -> tuple[SequenceGroup, ...]:
        if result.counts is None:
            self.core.metrics.forced_tokens += max(0, len(events.tokens) - len(events.ids))
        return ()

    def masks(self, plan: Plan) -> Masks:
        """Return the masks of a plan. A row without one is unconstrained or late."""
        num_rows = len(plan.slots)
        words, is_masked = np.zeros((num_rows, self._num_words), np.int32), np.zeros(num_rows, np.bool_)
        is_live = scheduler.is_live(self.core.scheduler.state, plan)
        live = self._is_constrained[plan.slots] & is_live
        owners = {row: self._batch.owner(int(plan.slots[row])) for row in live.nonzero()[0].tolist()}
        late = self._fill(owners, words)
        if late and len(late) == np.count_nonzero(is_live):
            self._slow.wait(MASK_SECONDS)
            late = self._fill(owners, words)
        self._late = plan.number, late
        stuck: list[tuple[Sequence, str]] = []
        for row, sequence in owners.items():
            if row in late:
                continue
            is_masked[row] = True
            constraint = self._constraint(sequence)
            error = constraint.error
            if error is not None and constraint.again is None:
                stuck.append((sequence, f"its grammar cannot go on: {error}"))
            with blaming(sequence):
                _hold_back(words[row], sequence)
        return Masks(words, is_masked, stuck)

    def close(self) -> None:
        self._slow.close()

    def _fill(self, owners: Mapping[int, Sequence], words: np.ndarray) -> list[int]:
        until = time.perf_counter() + MASK_SECONDS
        late: list[int] = []
        wanted: dict[Grammars, list[tuple[Constraint, int]]] = defaultdict(list)
        for row, sequence in owners.items():
            constraint = self._constraint(sequence)
            if constraint.job is None and constraint.pace.is_slow and constraint.error is None:
                self._begin(sequence, None)
            if constraint.job is None:
                wanted[sequence.group.language.grammars].append((constraint, row))
            elif not constraint.job.is_done:
                late.append(row)
            elif constraint.again is not None:
                words[row].view(np.uint32)[constraint.again // 32] = 1 << constraint.again % 32
            else:
                words[row], constraint.job = constraint.job.words, None
        if late:
            self._slow.start()
        for grammars, some in wanted.items():
            late += grammars.fill(some, words, until)
        return late

    def _constraint(self, sequence: Sequence) -> Constraint:
        return sequence.group.states[self.name][sequence.index]

    def _sampled_again(self, owners: Mapping[int, Sequence], tokens: np.ndarray) -> dict[int, list[int]]:
        """Return the forced tokens that follow, by row with a token that a thread consumed."""
        found = {}
        for row, sequence in owners.items():
            constraint = self._constraint(sequence)
            if constraint.again is not None:
                if constraint.again != tokens[row]:
                    constraint.fail("the engine sampled another token")
                found[row], constraint.again, constraint.due = constraint.due, None, []
        return found

    def _advance_all(
        self, owners: Mapping[int, Sequence], tokens: np.ndarray
    ) -> tuple[dict[int, list[int]], list[int]]:
        """Let grammars consume the tokens of rows; return the forced tokens that follow, and rows to be sampled again.

        Threads do this for slow masks and after the time limit. With bans the row then yields no token now, and later
        the same one with the forced tokens.
        """
        until, found, dropped = self.core.clock() + CONSUME_SECONDS, dict[int, list[int]](), list[int]()
        for row, sequence in sorted(owners.items(), key=lambda each: self._constraint(each[1]).turn):
            constraint, token = self._constraint(sequence), int(tokens[row])
            if not constraint.pace.is_slow and self.core.clock() <= until:
                found[row] = _advance(sequence, constraint, token)
                continue
            if sequence.variant is Variant.FULL and sequence.logprobs is None:
                constraint.again = token
                dropped.append(row)
            self._begin(sequence, token)
        return found, dropped

    def _begin(self, sequence: Sequence, token: int | None) -> None:
        constraint, grammars = self._constraint(sequence), sequence.group.language.grammars
        words = np.zeros((1, self._num_words), np.int32)

        def work() -> None:
            if sequence.finish_reason is not None:
                return
            if token is not None:
                forced = _advance(sequence, constraint, token)
                if constraint.again is not None and forced and self._take(sequence, forced):
                    constraint.due = forced
            with _failing(sequence, constraint):
                grammars.fill([(constraint, 0)], words)

        constraint.job = self._slow.begin(constraint.pace, work, words[0])

    def _take(self, sequence: Sequence, forced: list[int]) -> bool:
        """Advance a grammar by forced tokens; return False if it failed."""
        constraint = self._constraint(sequence)
        with _failing(sequence, constraint):
            for token in forced:
                constraint.consume(token)
            return True
        return False


def _advance(sequence: Sequence, constraint: Constraint, token: int) -> list[int]:
    """Advance a constraint by a token; return the tokens that must follow, if enough are certain."""
    with _failing(sequence, constraint):
        was_expected = bool(constraint.expected)
        constraint.consume(token)
        # Forced tokens have no log-probabilities.
        if token not in sequence.stop_ids and sequence.logprobs is None and not was_expected:
            forced = constraint.forced()
            end = next((at for at, each in enumerate(forced) if each in sequence.stop_ids), len(forced))
            constraint.expected = forced[:end] if end >= LEAST_FORCED else []
        return [*constraint.expected] if len(constraint.expected) >= LEAST_FORCED else []
    return []


@contextmanager
def _failing(sequence: Sequence, constraint: Constraint) -> Iterator[None]:
    """End the grammar, not the step, on an exception: a retry would feed others twice."""
    try:
        yield
    except Exception:
        _log.exception("the grammar of request %s failed", sequence.group.request_id)
        constraint.fail("the engine could not go on with it")


def _hold_back(words: np.ndarray, sequence: Sequence) -> None:
    """Ban stop tokens per `min_tokens` and `ignore_eos` in `words`, int32[W], unless nothing else is allowed."""
    held: Collection[int] = sequence.stop_ids if sequence.num_tokens < sequence.params.min_tokens else ()
    if sequence.params.ignore_eos:
        held = {*held, *sequence.eos_ids}
    ids = np.array([each for each in held if int(words[each // 32]) >> each % 32 & 1], np.int64)
    if not len(ids):
        return
    left = words.view(np.uint32).copy()
    np.bitwise_and.at(left, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
    if left.any():
        words[:] = left.view(np.int32)
