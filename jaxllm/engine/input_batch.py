"""The sequence in each slot, and from them the input of a step: tokens and sampling parameters.

An exception here on behalf of one sequence ends only its request (`RequestFault`). Knows plans and sequences; knows no
scheduler, device or clock.

Letters: S slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from jaxllm.engine.sequence import Sequence
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

    def __init__(self, num_slots: int) -> None:
        self.rows = np.zeros((num_slots, sampler.ROW_WIDTH), np.int32)  # packed, see sampling.pack_row
        self._sequences: list[Sequence | None] = [None] * num_slots
        self._variants = np.zeros(num_slots, np.int8)  # index into VARIANTS

    def place(self, slot: int, sequence: Sequence) -> None:
        """Put a sequence into a slot."""
        if sequence.row is None:
            raise RuntimeError("a sequence was queued before it was packed")
        self._sequences[slot] = sequence
        self._variants[slot] = VARIANTS.index(sequence.variant)
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
