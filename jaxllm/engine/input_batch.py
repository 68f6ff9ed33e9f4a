"""The sequence in each slot, and from them the input of a step: tokens, sampling parameters, positions to score.

An exception here on behalf of one sequence ends only its request (`RequestFault`). Knows plans and sequences; knows no
scheduler, device or clock.

Letters: S slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from jaxllm.engine.sequence import Sequence
from jaxllm.runner.results import Scored
from jaxllm.sampling import sampler
from jaxllm.sampling.sampler import Variant
from jaxllm.scheduler.state import Plan

VARIANTS = tuple(Variant)


class RequestFault(Exception):
    """The input of a step could not be made because of one sequence; `__cause__` says why."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(sequence.group.request_id)
        self.sequence = sequence


@contextmanager
def blaming(sequence: Sequence) -> Iterator[None]:
    """Turn any exception of the block into a `RequestFault` of the sequence."""
    try:
        yield
    except Exception as error:
        raise RequestFault(sequence) from error


class InputBatch:
    """The sequences by slot. A slot keeps its last sequence until the next is placed; only a plan says which run."""

    def __init__(self, num_slots: int, num_logprobs: int) -> None:
        """`num_logprobs` are those that every step returns; a sequence that wants more is scored separately."""
        self.rows = np.zeros((num_slots, sampler.ROW_WIDTH), np.int32)  # packed, see sampling.pack_row
        self._num_logprobs = num_logprobs
        self._sequences: list[Sequence | None] = [None] * num_slots
        self._variants = np.zeros(num_slots, np.int8)  # index into VARIANTS
        self._is_scored = np.zeros(num_slots, np.bool_)  # whether `scored` may list it
        self.is_constrained = np.zeros(num_slots, np.bool_)  # whether it obeys a grammar
        self.is_beam = np.zeros(num_slots, np.bool_)  # whether it is a beam of a search
        self._adapters = np.zeros(num_slots, np.int64)  # number of its adapter, 0 without

    def place(self, slot: int, sequence: Sequence) -> None:
        """Put a sequence into a slot."""
        if sequence.row is None:
            raise RuntimeError("a sequence was queued before it was packed")
        self._sequences[slot] = sequence
        self._variants[slot] = VARIANTS.index(sequence.variant)
        wants_prompt = sequence.index == 0 and sequence.group.num_prompt_logprobs is not None
        self._is_scored[slot] = wants_prompt or self._is_whole(sequence.params.logprobs)
        self.is_constrained[slot] = sequence.constraint is not None
        self.is_beam[slot] = sequence.group.search is not None
        self._adapters[slot] = 0 if sequence.group.adapter is None else sequence.group.adapter.number
        self.rows[slot] = sequence.row

    def owner(self, slot: int) -> Sequence:
        """Return the sequence of a slot."""
        sequence = self._sequences[slot]
        if sequence is None:
            raise RuntimeError(f"a plan names slot {slot}, which is empty")
        return sequence

    def variant(self, plan: Plan) -> Variant:
        """Return the narrowest sampling that serves every row of a plan."""
        return VARIANTS[int(self._variants[plan.slots].max())]

    def chunks(self, plan: Plan) -> list[np.ndarray]:
        """Return the tokens of a plan's chunks, int32[·] each."""
        first, chunks = plan.num_decodes, []
        for slot, start, length in zip(
            plan.slots[first:].tolist(), plan.starts[first:].tolist(), plan.lengths[first:].tolist(), strict=True
        ):
            sequence = self.owner(slot)
            with blaming(sequence):
                chunks.append(np.asarray(sequence.tokens[start : start + length], np.int32))
        return chunks

    def following(self, plan: Plan) -> list[tuple[int, int, int]]:
        """Return the token that follows each chunk that does not reach its sequence's end: slot, position, token."""
        first = plan.num_decodes
        ends = (plan.starts + plan.lengths)[first:].tolist()
        rows = zip(plan.slots[first:].tolist(), ends, plan.samples[first:].tolist(), strict=True)
        return [(slot, end, self.owner(slot).tokens[end]) for slot, end, samples in rows if not samples]

    def adapters(self, plan: Plan) -> np.ndarray:
        """Return the numbers of the adapters of a plan's rows, int64[R]."""
        return self._adapters[plan.slots]

    def token_types(self, plan: Plan) -> list[np.ndarray | None]:
        """Return the types of the tokens of a plan's whole prompts, int32[·] each; None: zeros."""
        return [self.owner(slot).token_types for slot in plan.slots.tolist()]

    def scored(self, plan: Plan) -> list[Scored]:
        """List the positions to score separately: prompt tokens, and rows that want more than a step returns."""
        scored: list[Scored] = []
        if not self._is_scored[plan.slots].any():
            return scored
        offset = 0
        for slot, start, length, samples in zip(
            plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), plan.samples.tolist(), strict=True
        ):
            sequence = self.owner(slot)
            if self._is_scored[slot]:
                with blaming(sequence):
                    scored += self._scored_of(sequence, start, length, samples, offset)
            offset += length
        return scored

    def _scored_of(self, sequence: Sequence, start: int, length: int, samples: bool, offset: int) -> list[Scored]:
        """List the positions to score of one row, whose tokens begin at `offset` of the step."""
        group, end = sequence.group, start + length
        scored: list[Scored] = []
        if sequence.index == 0 and group.misses_prompt_logprobs:
            is_whole = self._is_whole(group.num_prompt_logprobs)
            scored += [
                Scored(
                    sequence.sequence_id,
                    position,
                    offset + position - start - 1,
                    group.prompt_token_ids[position],
                    is_whole,
                )
                for position in range(start + 1, min(end + 1, len(group.prompt_token_ids)))
            ]
        if samples and self._is_whole(sequence.params.logprobs):
            scored.append(Scored(sequence.sequence_id, end, offset + length - 1, 0, True))
        return scored

    def _is_whole(self, count: int | None) -> bool:
        """Whether so many log-probabilities are more than a step reports."""
        return count is not None and not 0 <= count <= self._num_logprobs
