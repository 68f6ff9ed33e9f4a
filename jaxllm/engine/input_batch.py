"""The sequence in each slot, and a step's tokens and parameters."""

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
    """Raised when a sequence's input fails; ends only its request."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(sequence.group.request_id)
        self.sequence = sequence


@contextmanager
def blaming(sequence: Sequence) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RequestFault(sequence) from error


class InputBatch:
    """The sequences by slot, until the slot is reused."""

    def __init__(self, num_slots: int) -> None:
        self.rows = np.zeros((num_slots, sampler.ROW_WIDTH), np.int32)
        self._sequences: list[Sequence | None] = [None] * num_slots
        self._variants = np.zeros(num_slots, np.int8)

    def place(self, slot: int, sequence: Sequence) -> None:
        if sequence.row is None:
            raise RuntimeError("a sequence was queued before it was packed")
        self._sequences[slot] = sequence
        self._variants[slot] = VARIANTS.index(sequence.variant)
        self.rows[slot] = sequence.row

    def owner(self, slot: int) -> Sequence:
        sequence = self._sequences[slot]
        if sequence is None:
            raise RuntimeError(f"a plan names slot {slot}, which is empty")
        return sequence

    def variant(self, plan: Plan) -> Variant:
        return VARIANTS[int(self._variants[plan.slots].max())]

    def chunks(self, plan: Plan) -> list[np.ndarray]:
        first, chunks = plan.num_decodes, []
        for slot, start, length in zip(
            plan.slots[first:].tolist(), plan.starts[first:].tolist(), plan.lengths[first:].tolist(), strict=True
        ):
            sequence = self.owner(slot)
            with blaming(sequence):
                chunks.append(np.asarray(sequence.tokens[start : start + length], np.int32))
        return chunks
