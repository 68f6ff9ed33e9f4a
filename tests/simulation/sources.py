"""Encoder prompts in the simulation: their drawing, the naive rules of their blocks, and an encoder.

A source is a number, repeated. Its content in the cache follows from number, length and place; number and length enter
the hashes of sequences through their root.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.engine.source_prompts import SourcePrompts
from jaxllm.runner.source_encoder import SourceInputs
from jaxllm.scheduler.media import Encode
from tests.simulation.oracle import VOCABULARY, mix

if TYPE_CHECKING:
    from tests.simulation.blocks import Blocks
    from tests.simulation.device import Device
    from tests.simulation.reference import Entry

Source = tuple[int, int]  # number, tokens
# Settings that encoder-decoder models do not have; see docs/limits.md.
WITHOUT: Mapping[str, Any] = {
    **{"max_adapters": 0, "num_adapters": 0, "max_drafts": 0, "block_events": False, "media_units": 0},
    **{"host_blocks": [0, 0], "swaps": False, "has_disk": False, "window": 0, "num_window_blocks": 0},
}


def draw_sources(chance: random.Random, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Draw the settings of an encoder of prompts: none in most traces."""
    if chance.random() < 0.85:
        return {"max_source": 0}
    return with_sources(chance, setting)


def with_sources(chance: random.Random, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with sources of up to a few blocks, for which the pool has room or nearly has."""
    size = setting["block_size"]
    most = chance.choice((1, size, 2 * size + 1, 3 * size))
    num_blocks = setting["num_blocks"] + chance.choice((0, 1, 3)) * -(-most // size)
    own = {"max_source": most, "max_encoded": chance.choice((1, most, 2 * most)), "num_blocks": num_blocks}
    return {**setting, **WITHOUT, **own}


def place_source(chance: random.Random, request: dict[str, Any], setting: Mapping[str, Any]) -> None:
    """Give a request a source, which equals that of others often."""
    most = setting["max_source"]
    if most:
        request["source"] = [chance.randint(5, 8), chance.choice((most, most, chance.randint(1, most)))]
        request.pop("text", None)


def root_of(root: int, source: Source | None) -> int:
    """Return the root of a sequence's hashes."""
    return root if source is None else mix(mix(root, source[0]), source[1])


def prompts_of(setting: Mapping[str, Any], tokenizer: Any) -> SourcePrompts | None:
    most = setting["max_source"]
    return SourcePrompts(tokenizer=tokenizer, vocab_size=VOCABULARY, longest=most, start=()) if most else None


def content(source: Source, size: int, index: int) -> np.ndarray:
    """Return the content of a block, uint64[size]."""
    base = mix(mix(1 << 42, source[0]), source[1])
    return np.array([mix(base, index * size + offset) for offset in range(size)], np.uint64)


class Sources:
    """The naive rules: a running request has the blocks of its source, shared by content."""

    def __init__(self, blocks: Blocks, size: int, budget: int) -> None:
        self._blocks, self._size, self._budget = blocks, size, budget
        self.fired: Counter[str] = Counter()  # events, by name
        self.begin(())

    def begin(self, encodes: Sequence[Encode]) -> None:
        """Begin a plan."""
        self._encodes = [*encodes]
        self._num_encoded = 0

    @property
    def has_unread(self) -> bool:
        """Whether the plan encodes further sources, which are not due."""
        return bool(self._encodes)

    def _keys(self, entry: Entry) -> list[int]:
        if entry.source is None:
            return []
        return [mix(mix(entry.truth.root, 1 << 43), index) for index in range(-(-entry.source[1] // self._size))]

    def find(self, entry: Entry) -> tuple[list[int], int] | None:
        """Return the cached blocks and the number of new ones; None if the plan has encoded too much."""
        keys, hits = self._keys(entry), list[int]()
        while len(hits) < len(keys) and keys[len(hits)] in self._blocks.index:
            hits.append(self._blocks.index[keys[len(hits)]])
        if len(hits) < len(keys) and self._num_encoded:
            assert entry.source is not None
            if self._num_encoded + entry.source[1] > self._budget:
                self.fired["source_waits"] += 1
                return None
        return hits, len(keys) - len(hits)

    def enter(self, entry: Entry, hits: list[int], num_new: int) -> None:
        """Take the blocks that production chose, after those of `hits` are shared."""
        entry.source_blocks = [*hits]
        if entry.source is None:
            return
        self.fired["source_hit"] += not num_new
        self.fired["source_part_hit"] += bool(hits and num_new)
        if not num_new:
            return
        due = self._encodes.pop(0) if self._encodes else None
        if due is None or (due.sequence_id, due.index, [*due.units[: len(hits)]]) != (entry.id, len(hits), hits):
            raise AssertionError(f"a plan encodes {due}, where the source of request {entry.id} is due")
        if len(due.units) != len(hits) + num_new:
            raise AssertionError(f"a source has {len(due.units)} blocks, where {len(hits) + num_new} are due")
        num_free = len(self._blocks.free)
        for number, block in enumerate(due.units[len(hits) :]):
            self._blocks.take(block, number < num_free)
            entry.source_blocks.append(block)
        for key, block in zip(self._keys(entry), entry.source_blocks, strict=True):
            self._blocks.index.setdefault(key, block)
        self._num_encoded += entry.source[1]
        self.fired["source_encoded"] += 1

    def follow(self, entry: Entry, first: Entry) -> None:
        """Share the source of the first beam."""
        entry.source_blocks = [*first.source_blocks]
        self._blocks.share(entry.source_blocks)

    def leave(self, entry: Entry) -> None:
        for key, block in reversed([*zip(self._keys(entry), entry.source_blocks, strict=False)]):
            self._blocks.release(block, key)
        entry.source_blocks = []

    def forget(self, entry: Entry) -> None:
        """Drop the source of a failed request from the index."""
        for key, block in zip(self._keys(entry), entry.source_blocks, strict=False):
            self._blocks.forget(key, block)


class SourceRows:
    """The program that encodes sources, and each slot's source on the device."""

    def __init__(self, setting: Mapping[str, Any], device: Device) -> None:
        self.max_tokens = setting["max_source"]
        self.budget = setting["max_encoded"]
        self._device = device
        device.sources = {}

    def prepare(self, params: Any, state: Any, given: SourceInputs) -> Any:
        device = self._device
        size, held = device.geometry.block_size, device.content[0]
        for new in given.new:
            source = int(new.content[0]), len(new.content)
            for index, block in enumerate(new.blocks):
                if index >= new.num_cached:
                    held[block * size : (block + 1) * size] = content(source, size, index)
        for each in given.placed:
            device.sources[each.slot] = each.num_tokens, [*each.blocks]
        return state
