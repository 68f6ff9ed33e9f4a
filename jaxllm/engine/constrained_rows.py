"""The rows of steps whose sequences obey a grammar: their masks, and the tokens that a grammar forces.

Between a plan and its masks all earlier steps are committed, so a constraint has always read the tokens that its row
continues. Masks have a time in each step. A row without a mask by then is late: it yields no token and is
computed again. Deals with plans, sequences and constraints, not with devices or text.

Letters: R rows of a plan, W words of a mask, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from jaxllm.engine.input_batch import InputBatch, blaming
from jaxllm.engine.sequence import Sequence
from jaxllm.runner.results import Result
from jaxllm.sampling.sampler import Variant
from jaxllm.scheduler import scheduler
from jaxllm.scheduler.state import Plan, State
from jaxllm.structured_output.constraint import Constraint
from jaxllm.structured_output.grammars import Grammars
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
Stuck = list[tuple[Sequence, str]]  # whose grammar cannot go on, and why


class Masks(NamedTuple):
    """What a step may sample."""

    words: np.ndarray  # int32[R, W], a bit for each token
    is_masked: np.ndarray  # bool[R]: the rows that they hold for; no live row's is missing but one that is late
    stuck: Stuck  # such a row of words is zero


class ConstrainedRows:
    """Follows the grammars of the sequences in an input batch."""

    def __init__(self, batch: InputBatch, grammars: Grammars, vocab_size: int) -> None:
        self._batch = batch
        self._grammars = grammars
        self._num_words = -(-vocab_size // 32)
        self._slow = SlowMasks()
        self._late: tuple[int, list[int]] = (0, [])  # number of the plan that masks were made for, its late rows

    def any(self, plan: Plan) -> bool:
        """Whether a plan samples a row that obeys a grammar."""
        return bool((self._batch.is_constrained[plan.slots] & plan.samples).any())

    def take_in(self, state: State, plan: Plan, result: Result) -> tuple[np.ndarray, np.ndarray | None]:
        """Tell grammars what a step sampled, before it is committed; return its tokens and counts for `commit`.

        A row yields the tokens that its grammar forces behind the sampled one as well, if all rows have enough of them.
        """
        constrained = self._batch.is_constrained[plan.slots]
        if not constrained.any():
            return result.tokens, None
        late = self._late[1] if self._late[0] == plan.number else []
        rows = (constrained & result.is_finite & scheduler.is_live(state, plan)).nonzero()[0].tolist()
        owners = {row: self._batch.owner(int(plan.slots[row])) for row in rows if row not in late}
        found = {row: self._advance(own, int(result.tokens[row])) for row, own in owners.items()}
        worth = sum(map(len, found.values())) >= FORCED_PER_ROW * len(plan.slots)
        # What bans tokens would ban those that a mask leaves, too: such rows never have forced ones sampled.
        yielded = {
            row: forced for row, forced in found.items() if forced and (worth or owners[row].variant is Variant.FULL)
        }
        yielded = {row: forced for row, forced in yielded.items() if _take(owners[row], forced)}
        if not yielded and not late:
            return result.tokens, None
        counts = np.ones(len(plan.slots), np.int32)
        counts[late] = 0
        tokens = np.zeros((len(plan.slots), 1 + max(map(len, yielded.values()), default=0)), np.int32)
        tokens[:, 0] = result.tokens
        for row, forced in yielded.items():
            counts[row] += len(forced)
            tokens[row, 1 : counts[row]] = forced
        return tokens, counts

    def masks(self, state: State, plan: Plan) -> Masks:
        """Say what a plan's rows may sample, now that all steps before it are committed."""
        num_rows = len(plan.slots)
        words, is_masked = np.zeros((num_rows, self._num_words), np.int32), np.zeros(num_rows, np.bool_)
        is_live = scheduler.is_live(state, plan)
        live = self._batch.is_constrained[plan.slots] & is_live
        owners = {row: self._batch.owner(int(plan.slots[row])) for row in live.nonzero()[0].tolist()}
        late = self._fill(owners, words)
        if late and len(late) == np.count_nonzero(is_live):  # the step would yield nothing yet
            self._slow.wait(MASK_SECONDS)
            late = self._fill(owners, words)
        self._late = plan.number, late
        stuck: Stuck = []
        for row, own in owners.items():
            if row in late:
                continue
            is_masked[row] = True
            assert own.constraint is not None
            if own.constraint.error is not None:
                stuck.append((own, own.constraint.error))
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
            constraint = own.constraint
            assert constraint is not None
            if constraint.job is None and constraint.pace.is_slow and constraint.error is None:
                self._begin(own, None)
            if constraint.job is None:
                wanted[self._grammars_of(own)].append((constraint, row))
            elif constraint.job.is_done:
                words[row], constraint.job = constraint.job.words, None
            else:
                late.append(row)
        if late:
            self._slow.start()
        for grammars, some in wanted.items():
            late += grammars.fill(some, words, until)
        return late

    def _grammars_of(self, own: Sequence) -> Grammars:
        adapter = own.group.adapter
        return self._grammars if adapter is None else adapter.language.grammars

    def _advance(self, own: Sequence, token: int) -> list[int]:
        """Let a sequence's grammar read a token; return the tokens forced after it, if they are worth a row.

        Another thread does it for a request with slow masks: then forced tokens are sampled one by one. If the request
        bans tokens, which could be forced ones, they are read here; only its masks are made by the thread.
        """
        assert own.constraint is not None
        if not own.constraint.pace.is_slow or own.variant is Variant.FULL:
            return _advance(own, token)
        self._begin(own, token)
        return []

    def _begin(self, own: Sequence, token: int | None) -> None:
        """Queue reading a token, if any, and the next mask of a sequence for other threads."""
        constraint, grammars = own.constraint, self._grammars_of(own)
        assert constraint is not None
        words = np.zeros((1, self._num_words), np.int32)

        def work() -> None:
            if own.finish_reason is not None:
                return
            if token is not None:
                _advance(own, token)
            with _failing(own):
                grammars.fill([(constraint, 0)], words)

        constraint.job = self._slow.begin(constraint.pace, work, words[0])


def _advance(own: Sequence, token: int) -> list[int]:
    """Let a sequence's grammar read a token; return the tokens forced after it, if they are worth a row."""
    with _failing(own) as constraint:
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


def _take(own: Sequence, forced: list[int]) -> bool:
    """Let a sequence's grammar read what it forces; return whether it could."""
    with _failing(own) as constraint:
        for token in forced:
            constraint.consume(token)
        return True
    return False


@contextmanager
def _failing(own: Sequence) -> Iterator[Constraint]:
    """End a grammar with an exception, and not the step: grammars of other rows would read its tokens twice."""
    assert own.constraint is not None
    try:
        yield own.constraint
    except Exception:
        _log.exception("the grammar of request %s failed", own.group.request_id)
        own.constraint.fail("the engine could not go on with it")


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
