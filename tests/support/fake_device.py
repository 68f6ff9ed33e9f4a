"""A device without arithmetic that records the tokens written to every place of the KV pool.

The next token of a sequence is a hash of its tokens, so an output depends on its request alone. Reading a place that
holds anything but the sequence's prefix is an error, which reveals stale blocks, early prefix hits, double ownership
and wrong tables. The device drafts as plans require; `num_right` draws how many drafts of a row are right, and wrong
ones leave wrong tokens in the pool.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxllm.scheduler.state import Limits, Plan, Source

VOCABULARY = 50


def next_token(tokens: tuple[int, ...], request_id: int) -> int:
    """Return the token that follows `tokens` in a request."""
    return zlib.crc32(repr((tokens, request_id)).encode()) % VOCABULARY


class FakeDevice:
    """Runs plans, with a block table and the tokens of each slot as on a real device."""

    def __init__(self, limits: Limits, num_right: Callable[[int], int] = lambda count: count) -> None:
        self.limits = limits
        self.num_right = num_right
        self.has_drafts: set[int] = set()  # slots
        self.full: dict[int, array[int]] = {}  # by request id: all tokens on the host, updated by the test
        self.tables: dict[tuple[int, int], int] = {}
        self.tokens: dict[int, list[int]] = {}  # by slot: tokens on the device; -1: never sent
        self.truth: dict[int, list[int]] = {}  # by slot: the true sequence, possibly one token longer than on the host
        self.written: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.sources: dict[int, Source] = {}  # by request id
        self.source_tables: dict[int, tuple[int, ...]] = {}  # by slot

    def run(
        self,
        plan: Plan,
        chunks: list[list[int]],
        owners: dict[int, int],
        history: Sequence[tuple[int, int, int]] = (),
        sources: Sequence[tuple[int, ...]] = (),
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Execute a plan; `chunks` are the tokens of the rows after the decode rows, `owners` maps slots to request
        ids.

        `history` is (slot, position, token) for newest tokens chosen by the host; `sources` are those of the state
        after the plan. Returns tokens, int32[R], and None;
        if the plan verifies drafts, int32[R, W] and the counts of rows, int32[R].
        """
        limits = self.limits
        for slot, position, token in history:
            self.tokens[slot] = [*[-1] * position, token]
            self.truth[slot] = self.full[owners[slot]][: position + 1].tolist()
        held = dict(self.written)
        for _, _, source, _, target in plan.moves.tolist():
            for offset in range(limits.block_size):
                self.written.pop((target, offset), None)
                if (source, offset) in held:
                    self.written[target, offset] = held[source, offset]
        self._encode(plan, sources)
        assert plan.num_tokens <= limits.max_step_tokens, "token budget"
        assert len(plan.slots) - plan.num_decodes <= limits.max_step_chunks, "chunk budget"
        assert len(set(plan.slots.tolist())) == len(plan.slots) <= limits.num_slots, "a slot has one row"
        for admission in plan.admitted:  # the device never saw cached tokens in this slot
            self.tokens[admission.slot] = [-1] * admission.num_cached
            self.truth[admission.slot] = self.full[admission.request.sequence_id][: admission.num_known].tolist()
        for slot, index, block in plan.table.tolist():
            assert 0 <= slot < limits.num_slots and 0 <= block < limits.num_blocks
            self.tables[slot, index] = block
        rows = list(zip(plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True))
        assert not plan.num_drafts or plan.num_tokens <= limits.max_verified, "budget of verified tokens"
        for number, (slot, bound, length) in enumerate(rows[: plan.num_decodes]):
            start = len(self.truth[slot]) - 1
            assert start <= bound and length <= 1 + limits.max_drafts
            assert length == 1 or slot in self.has_drafts, "drafts that were not made"
            rows[number] = slot, start, length
        counts = np.ones(len(rows), np.int32)
        writes: set[tuple[int, int]] = set()
        for number, (slot, start, length) in enumerate(rows):  # all rows write before any row reads
            if number >= plan.num_decodes:
                before = self.tokens[slot][:start]
                self.tokens[slot] = [*before, *[-1] * (start - len(before)), *chunks[number - plan.num_decodes]]
                if len(self.truth[slot]) < start + length:  # a fork of another slot's sequence, in its first row
                    self.truth[slot] = self.full[owners[slot]].tolist()
            if number < plan.num_decodes and length > 1:
                counts[number] += self.num_right(length - 1)
                for _ in range(counts[number] - 1):
                    self._append(slot, owners[slot])
            for position in range(start, start + length):
                place = self._place(slot, position)
                assert place not in writes, "two rows write one place"
                writes.add(place)
                is_right = number >= plan.num_decodes or position < start + counts[number]
                self.written[place] = self._prefix(slot, position + 1) if is_right else (-1,)
        sampled = np.zeros((len(rows), int(plan.lengths.max()) if plan.num_drafts else 1), np.int32)
        for number, (slot, start, length) in enumerate(rows):
            self._read_source(slot, owners[slot])
            end = start + (int(counts[number]) if number < plan.num_decodes else length)
            for position in range(end):
                found = self.written.get(self._place(slot, position))
                assert found == self._prefix(slot, position + 1), f"slot {slot} reads a stale place"
            if plan.samples[number]:
                self._append(slot, owners[slot])
                sampled[number, : counts[number]] = self.truth[slot][-counts[number] :]
            self.has_drafts.discard(slot)
        if plan.proposes:
            self.has_drafts |= set(plan.slots.tolist())
        return (sampled, counts) if plan.num_drafts else (sampled[:, 0], None)

    def _encode(self, plan: Plan, sources: Sequence[tuple[int, ...]]) -> None:
        encoded = [self.sources[each.sequence_id].length for each in plan.encodes]
        assert sum(encoded) <= self.limits.max_encoded or len(encoded) <= 1, "budget of the encoder"
        for each in plan.encodes:
            for part, block in enumerate(each.units):
                content = (self.sources[each.sequence_id].digest, part)
                if part >= each.index:
                    self.written |= {(block, offset): content for offset in range(self.limits.block_size)}
                assert self.written.get((block, 0)) == content, "a block of a source that is not cached"
        if sources:
            self.source_tables |= {each.slot: sources[each.slot] for each in plan.admitted}

    def _read_source(self, slot: int, request_id: int) -> None:
        source = self.sources.get(request_id)
        if source is not None:
            table = self.source_tables[slot]
            assert len(table) == -(-source.length // self.limits.block_size)
            for part, block in enumerate(table):
                assert self.written.get((block, 0)) == (source.digest, part), f"slot {slot} reads a stale source"

    def _append(self, slot: int, request_id: int) -> None:
        """Sample the next token of a slot."""
        token = next_token(self._prefix(slot, len(self.truth[slot])), request_id)
        self.tokens[slot] = [*self.tokens[slot], token]
        self.truth[slot] = [*self.truth[slot], token]

    def _prefix(self, slot: int, length: int) -> tuple[int, ...]:
        tokens = self.truth[slot]
        assert length <= len(tokens), "a position beyond the tokens that there are"
        assert all(mine in (-1, theirs) for mine, theirs in zip(self.tokens[slot][:length], tokens, strict=False))
        return tuple(tokens[:length])

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        return self.tables[slot, position // self.limits.block_size], position % self.limits.block_size
