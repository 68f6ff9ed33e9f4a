"""Which sample sits in which slot, and what a step is told of those in it: tokens, sampling, positions to score.

What goes wrong here for one of a step's samples is that one's fault alone (`RequestFault`). Knows plans and samples;
knows no scheduler, device or clock.

Letters: S slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from jaxllm.engine.sequence import Sample
from jaxllm.runner.step import Scored
from jaxllm.sampling import sampler
from jaxllm.sampling.sampler import Variant
from jaxllm.scheduler.state import Plan

VARIANTS = tuple(Variant)


class RequestFault(Exception):
    """A step could not be made ready because of one of its samples; the cause is the exception behind it."""

    def __init__(self, sample: Sample) -> None:
        super().__init__(sample.group.request_id)
        self.sample = sample


@contextmanager
def blaming(sample: Sample) -> Iterator[None]:
    """Do something for one sample of a step; what goes wrong is its fault alone."""
    try:
        yield
    except Exception as error:
        raise RequestFault(sample) from error


class Seats:
    """The samples by slot. A slot keeps its last one until the next sits there: only a plan says who runs."""

    def __init__(self, num_slots: int, num_logprobs: int) -> None:
        """`num_logprobs` are those that every step reports; who wants more is scored by itself."""
        self.rows = np.zeros((num_slots, sampler.ROW_WIDTH), np.int32)  # packed, see sampling.pack_row
        self._num_logprobs = num_logprobs
        self._samples: list[Sample | None] = [None] * num_slots
        self._variants = np.zeros(num_slots, np.int8)  # index into VARIANTS
        self._is_scored = np.zeros(num_slots, np.bool_)  # whether `scored` may list it

    def give(self, slot: int, sample: Sample) -> None:
        """Let a sample sit down."""
        if sample.row is None:
            raise RuntimeError("a sample was queued before it was packed")
        self._samples[slot] = sample
        self._variants[slot] = VARIANTS.index(sample.variant)
        wants_prompt = sample.index == 0 and sample.group.num_prompt_logprobs is not None
        self._is_scored[slot] = wants_prompt or self._is_whole(sample.params.logprobs)
        self.rows[slot] = sample.row

    def owner(self, slot: int) -> Sample:
        """Return who sits there."""
        sample = self._samples[slot]
        if sample is None:
            raise RuntimeError(f"a plan names slot {slot}, which nobody has")
        return sample

    def variant(self, plan: Plan) -> Variant:
        """Return the narrowest sampling that serves every row of a plan."""
        return VARIANTS[int(self._variants[plan.slots].max())]

    def chunks(self, plan: Plan) -> list[np.ndarray]:
        """Return the tokens of a plan's chunks, int32[·] each."""
        first, chunks = plan.num_decodes, []
        for slot, start, length in zip(
            plan.slots[first:].tolist(), plan.starts[first:].tolist(), plan.lengths[first:].tolist(), strict=True
        ):
            sample = self.owner(slot)
            with blaming(sample):
                chunks.append(np.asarray(sample.tokens[start : start + length], np.int32))
        return chunks

    def scored(self, plan: Plan) -> list[Scored]:
        """List what of a step is to be scored by itself: tokens of prompts, and rows of more than a step reports."""
        scored: list[Scored] = []
        if not self._is_scored[plan.slots].any():
            return scored
        offset = 0
        for slot, start, length, samples in zip(
            plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), plan.samples.tolist(), strict=True
        ):
            sample = self.owner(slot)
            if self._is_scored[slot]:
                with blaming(sample):
                    scored += self._scored_of(sample, start, length, samples, offset)
            offset += length
        return scored

    def _scored_of(self, sample: Sample, start: int, length: int, samples: bool, offset: int) -> list[Scored]:
        """List what is to be scored of one row, whose tokens begin at `offset` of the step."""
        group, end = sample.group, start + length
        scored: list[Scored] = []
        if sample.index == 0 and group.misses_prompt_logprobs:
            is_whole = self._is_whole(group.num_prompt_logprobs)
            scored += [
                Scored(sample.id, position, offset + position - start - 1, group.prompt_token_ids[position], is_whole)
                for position in range(start + 1, min(end + 1, len(group.prompt_token_ids)))
            ]
        if samples and self._is_whole(sample.params.logprobs):
            scored.append(Scored(sample.id, end, offset + length - 1, 0, True))
        return scored

    def _is_whole(self, count: int | None) -> bool:
        """Whether so many log-probabilities are more than a step reports."""
        return count is not None and not 0 <= count <= self._num_logprobs
