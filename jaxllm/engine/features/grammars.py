"""Structured output: the masks of rows that obey a grammar, and the tokens that a grammar forces.

Between a plan and its masks all earlier steps are committed, so a constraint has always read the tokens that its row
continues. Masks have a time in each step. A row without a mask by then is late: it yields no token and is
computed again.

Letters: R rows of a plan, W words of a mask, V vocabulary.
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

_log = logging.getLogger(__name__)
LEAST_FORCED = 2  # tokens worth a row of their own: the row that is in flight for the first of them is lost
# Tokens of all rows, by row of the step, that are worth a step of chunks: with 32 rows on two cores it takes 65 ms, and
# one of a token each takes 36. Fewer are sampled one by one, from masks that allow nothing else.
FORCED_PER_ROW = 0.5
# Seconds for the masks of a step; the last one may take longer, 0.1 to 0.2 s if its grammar is expensive, but the next
# ones of its request are made by other threads. With 126 such outputs the tokens of a stream are 0.05 to 0.12 s apart
# at the median and at most 0.5 s, on two cores with a load of 12.
MASK_SECONDS = 0.05


class GrammarRows(Feature):
    """Follows the grammars of the sequences that run. The state of a request is a constraint for each sequence."""

    name = "grammars"

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._batch = core.batch
        self._num_words = -(-core.language.model.vocab_size // 32)
        self._is_constrained = np.zeros(core.runner.limits.num_slots, np.bool_)  # by slot
        self._slow = SlowMasks()
        self._late: tuple[int, list[int]] = (0, [])  # number of the plan that masks were made for, its late rows

    def accept(self, accepted: Accepted) -> None:
        """Compile the grammar that the outputs of a request must obey, if it gives one."""
        asked = accepted.params.structured_outputs
        if asked is None:
            return
        accepted.states[self.name] = accepted.language.grammars.compile(asked)
        accepted.packed = replace(accepted.params, min_tokens=0)  # its masks see to that

    def begin(self, accepted: Accepted, group: SequenceGroup) -> None:
        """Begin a constraint for each sequence."""
        grammar: Grammar | None = accepted.states.get(self.name)
        if grammar is None:
            return
        group.states[self.name] = [grammar.begin() for _ in group.sequences]
        for own in group.sequences:  # with `ignore_eos` too: masks allow an end only where nothing else may follow
            own.eos_ids = group.language.model.eos_ids

    def schedule(self, own: Sequence, fields: dict[str, Any]) -> None:
        """Let no drafts be verified for a row with a mask, which is made of the token before."""
        if self.name in own.group.states:
            fields["may_draft"] = False

    def place(self, slot: int, own: Sequence) -> None:
        """Note whether the sequence of a slot obeys a grammar."""
        self._is_constrained[slot] = self.name in own.group.states

    def inputs(self, step: StepInput) -> None:
        """Hold a step that samples a row which obeys a grammar."""
        step.is_held |= bool((self._is_constrained[step.plan.slots] & step.plan.samples).any())

    def read(self, plan: Plan, result: StepOutput, yielded: Yielded) -> None:
        """Let grammars read the sampled tokens.

        A row yields the tokens that its grammar forces behind the sampled one as well, if all rows have enough of them.
        """
        constrained = self._is_constrained[plan.slots]
        if not constrained.any():
            return
        late = self._late[1] if self._late[0] == plan.number else []
        is_live = scheduler.is_live(self.core.scheduler.state, plan)
        rows = (constrained & result.is_finite & is_live).nonzero()[0].tolist()
        owners = {row: self._batch.owner(int(plan.slots[row])) for row in rows if row not in late}
        found = {row: self._advance(own, int(result.tokens[row])) for row, own in owners.items()}
        worth = sum(map(len, found.values())) >= FORCED_PER_ROW * len(plan.slots)
        # What bans tokens would ban those that a mask leaves, too: such rows never have forced ones sampled.
        several = {
            row: forced for row, forced in found.items() if forced and (worth or owners[row].variant is Variant.FULL)
        }
        several = {row: forced for row, forced in several.items() if self._take(owners[row], forced)}
        if not several and not late:
            return
        counts = np.ones(len(plan.slots), np.int32)
        counts[late] = 0
        tokens = np.zeros((len(plan.slots), 1 + max(map(len, several.values()), default=0)), np.int32)
        tokens[:, 0] = result.tokens
        for row, forced in several.items():
            counts[row] += len(forced)
            tokens[row, 1 : counts[row]] = forced
        yielded.tokens, yielded.counts = tokens, counts

    def take_in(self, plan: Plan, result: StepOutput, events: Events) -> tuple[SequenceGroup, ...]:
        """Count the tokens that grammars forced."""
        if result.counts is None:
            self.core.metrics.forced_tokens += max(0, len(events.tokens) - len(events.ids))
        return ()

    def masks(self, plan: Plan) -> Masks:
        """Return the tokens that rows may sample. A row without a mask is free, or late and yields nothing."""
        num_rows = len(plan.slots)
        words, is_masked = np.zeros((num_rows, self._num_words), np.int32), np.zeros(num_rows, np.bool_)
        is_live = scheduler.is_live(self.core.scheduler.state, plan)
        live = self._is_constrained[plan.slots] & is_live
        owners = {row: self._batch.owner(int(plan.slots[row])) for row in live.nonzero()[0].tolist()}
        late = self._fill(owners, words)
        if late and len(late) == np.count_nonzero(is_live):  # the step would yield nothing yet
            self._slow.wait(MASK_SECONDS)
            late = self._fill(owners, words)
        self._late = plan.number, late
        stuck: list[tuple[Sequence, str]] = []
        for row, own in owners.items():
            if row in late:
                continue
            is_masked[row] = True
            error = self._constraint(own).error
            if error is not None:
                stuck.append((own, f"its grammar cannot go on: {error}"))
            with blaming(own):
                _hold_back(words[row], own)
        return Masks(words, is_masked, stuck)

    def close(self) -> None:
        """Make no more masks."""
        self._slow.close()

    def _fill(self, owners: Mapping[int, Sequence], words: np.ndarray) -> list[int]:
        """Write the masks of rows in the time of a step; return the rows without masks."""
        until = time.perf_counter() + MASK_SECONDS
        late: list[int] = []
        wanted: dict[Grammars, list[tuple[Constraint, int]]] = defaultdict(list)
        for row, own in owners.items():
            constraint = self._constraint(own)
            if constraint.job is None and constraint.pace.is_slow and constraint.error is None:
                self._begin(own, None)
            if constraint.job is None:
                wanted[own.group.language.grammars].append((constraint, row))
            elif constraint.job.is_done:
                words[row], constraint.job = constraint.job.words, None
            else:
                late.append(row)
        if late:
            self._slow.start()
        for grammars, some in wanted.items():
            late += grammars.fill(some, words, until)
        return late

    def _constraint(self, own: Sequence) -> Constraint:
        return own.group.states[self.name][own.index]

    def _advance(self, own: Sequence, token: int) -> list[int]:
        """Let a sequence's grammar read a token; return the tokens forced after it, if they are worth a row.

        Another thread does it for a request with slow masks: then forced tokens are sampled one by one. If the request
        bans tokens, which could be forced ones, they are read here; only its masks are made by the thread.
        """
        constraint = self._constraint(own)
        if not constraint.pace.is_slow or own.variant is Variant.FULL:
            return _advance(own, constraint, token)
        self._begin(own, token)
        return []

    def _begin(self, own: Sequence, token: int | None) -> None:
        """Queue reading a token, if any, and the next mask of a sequence for other threads."""
        constraint, grammars = self._constraint(own), own.group.language.grammars
        words = np.zeros((1, self._num_words), np.int32)

        def work() -> None:
            if own.finish_reason is not None:
                return
            if token is not None:
                _advance(own, constraint, token)
            with _failing(own, constraint):
                grammars.fill([(constraint, 0)], words)

        constraint.job = self._slow.begin(constraint.pace, work, words[0])

    def _take(self, own: Sequence, forced: list[int]) -> bool:
        """Let a sequence's grammar read the tokens that it forces; return whether it could."""
        constraint = self._constraint(own)
        with _failing(own, constraint):
            for token in forced:
                constraint.consume(token)
            return True
        return False


def _advance(own: Sequence, constraint: Constraint, token: int) -> list[int]:
    """Let a sequence's grammar read a token; return the tokens forced after it, if they are worth a row."""
    with _failing(own, constraint):
        was_expected = bool(constraint.expected)
        constraint.consume(token)
        # Forced tokens have no log-probabilities: nothing computes any for them. Behind the last of them one is sampled
        # freely, as it is if all come at once.
        if token not in own.stop_ids and own.logprobs is None and not was_expected:
            forced = constraint.forced()
            end = next((at for at, each in enumerate(forced) if each in own.stop_ids), len(forced))
            constraint.expected = forced[:end] if end >= LEAST_FORCED else []
        return [*constraint.expected] if len(constraint.expected) >= LEAST_FORCED else []
    return []


@contextmanager
def _failing(own: Sequence, constraint: Constraint) -> Iterator[None]:
    """End a grammar with an exception, and not the step: grammars of other rows would read its tokens twice."""
    try:
        yield
    except Exception:
        _log.exception("the grammar of request %s failed", own.group.request_id)
        constraint.fail("the engine could not go on with it")


def _hold_back(words: np.ndarray, own: Sequence) -> None:
    """Ban stop tokens as `min_tokens` and `ignore_eos` ask, unless the grammar allows nothing else: int32[W]."""
    held: Collection[int] = own.stop_ids if own.num_tokens < own.params.min_tokens else ()
    if own.params.ignore_eos:
        held = {*held, *own.eos_ids}
    ids = np.array([each for each in held if int(words[each // 32]) >> each % 32 & 1], np.int64)
    if not len(ids):
        return
    left = words.view(np.uint32).copy()
    np.bitwise_and.at(left, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
    if left.any():
        words[:] = left.view(np.int32)
