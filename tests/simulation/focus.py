"""Settings and events with which a trace often reaches a state that is rare in random traces.

Random traces reach a state that needs two events at once only a few times in ten thousand steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.simulation.sources import with_sources


@dataclass(frozen=True)
class Focus:
    """Settings and events that lead a trace to a state."""

    setting: Callable[[random.Random], dict[str, Any]]  # replaces the setting that was drawn
    rates: Mapping[str, float]  # by kind of event, in a turn; requests aside, no other events happen
    reaches: tuple[str, ...]  # counters that a thousand steps must raise, see `World.fired`
    phases: tuple[str | None, ...] = (None,)  # of the requests that are aborted or disconnected, see `events.phase_of`


def windowed_blocks(chance: random.Random, window: int, block_size: int, num_blocks: int) -> int:
    """Draw the number of blocks of windowed layers, from the need of one request to that of full layers' blocks."""
    if not window:
        return 0
    need = min(num_blocks, -(-(window - 1) // block_size) + 1 + -(-2 // block_size))
    return chance.choice((need, need + chance.randint(0, 2 * need), chance.randint(need, num_blocks), num_blocks))


def _tight(chance: random.Random, slots: int, spare: int, **others: Any) -> dict[str, Any]:
    """Return settings with a pool that holds one long request, but not all running ones."""
    size = chance.choice((1, 2, 2, 4))
    length = size * chance.choice((6, 8))
    own = {"block_size": size, "max_model_len": length, "num_blocks": length // size + chance.randint(1, spare)}
    window = chance.choice((0, 0, 1, size, size + 1, 2 * size))
    own |= {"window": window, "num_window_blocks": windowed_blocks(chance, window, size, own["num_blocks"])}
    own |= {"host_blocks": [0, 0], "swaps": False, "has_disk": False}
    return own | {"num_slots": slots, "max_step_tokens": max(slots, 8), "most_queued": 4 * slots} | others


def _pictured(chance: random.Random, **others: Any) -> dict[str, Any]:
    """Return settings with an encoder that caches one to three images."""
    own = _tight(chance, 4, 20, beams=0.0, grammars=0.1, prefix_caching=True, most_queued_tokens=None)
    own |= {"max_drafts": chance.choice((0, 3)), "costs": [0, 0]}
    unit, longest = chance.choice((1, 2)), chance.choice((2, 5))
    own |= {"max_step_tokens": chance.choice((4, 8, 64)), "media_unit": unit, "media_longest": longest}
    own["media_units"] = -(-longest // unit) * chance.choice((1, 2, 3))
    return own | {"max_encoded": chance.choice((1, longest, 100))} | others


def _hosted(setting: dict[str, Any], times: int, **others: Any) -> dict[str, Any]:
    """Return settings with a host tier that is `times` as large as the device's pools."""
    blocks = times * setting["num_blocks"], times * setting["num_window_blocks"]
    return setting | {"host_blocks": [*blocks]} | others


def with_stages(count: int) -> dict[str, Any]:
    """Return settings with batches in flight in `count` stages, without the features that need one."""
    absent = dict.fromkeys(("max_adapters", "num_adapters", "max_kept", "max_drafts", "media_units", "max_source"), 0)
    return absent | {"num_stages": count, "host_blocks": [0, 0], "swaps": False, "has_disk": False}


FOCUS = {
    # Batches in flight in two and four stages, with requests that end, are preempted or fail on the way.
    "stages": Focus(
        lambda chance: _tight(chance, 8, 8, beams=0.2, grammars=0.2) | with_stages(chance.choice((2, 4))),
        {"abort": 0.1, "disconnect": 0.05, "not_finite": 0.02, "result_lost": 0.01, "masks_late": 0.05},
        ("empty_tick", "left_for_later", "waited_tick", "preemption", "beam_forks", "masks_late", "not_finite"),
    ),
    # Beam searches that are preempted, run again in a pool that is as small as before, fork and end there.
    "searches": Focus(
        lambda chance: _tight(chance, 6, 6, beams=0.8, max_drafts=0, grammars=0.0, most_queued_tokens=None),
        {"abort": 0.05, "disconnect": 0.05, "result_lost": 0.01, "not_finite": 0.02},
        ("beam_group_preempted", "beam_group_readmitted", "beam_forks", "beam_copies"),
        (None, "preempted"),
    ),
    # Rows with a late mask that end, are preempted or lose the device before they are computed again.
    "late masks": Focus(
        lambda chance: _tight(chance, 5, 8, beams=0.0, max_drafts=chance.choice((0, 0, 3)), grammars=0.9),
        {"masks_late": 0.7, "abort": 0.2, "disconnect": 0.1, "result_lost": 0.02, "allocation_refused": 0.02},
        ("masks_late", "late_ended", "late_preempted"),
    ),
    # Requests that are aborted or disconnected while they are preempted.
    "preempted": Focus(
        lambda chance: _tight(chance, 8, 4, beams=0.1, grammars=0.1, policy="priority"),
        {"abort": 0.3, "disconnect": 0.3, "allocation_refused": 0.02},
        ("abort_preempted", "disconnect_preempted", "preemption"),
        ("preempted",),
    ),
    # More adapters than places, and files that change while requests for them wait.
    "adapters": Focus(
        lambda chance: _tight(chance, 4, 20, max_adapters=chance.choice((1, 2)), num_adapters=6, max_kept=2, beams=0.1),
        {"reload_adapter": 0.3, "put_raises": 0.03, "abort": 0.05},
        ("adapter_skipped", "adapter_drained", "adapter_evicted", "reload_adapter", "put_raises"),
    ),
    # Drafts in a pool with few blocks for them, and steps that fail with drafts in flight.
    "drafts": Focus(
        lambda chance: _tight(
            chance, 5, 4, max_drafts=4, costs=[0, 0], beams=0.0, grammars=0.05, most_verified=chance.choice((256, 6))
        ),
        {"result_lost": 0.02, "raise_after": 0.02, "not_finite": 0.02, "abort": 0.05},
        ("draft_scarce", "draft_limited", "draft_blocks", "drafts_all_kept", "drafts_all_wrong", "result_lost"),
    ),
    # Prompts that begin alike in a pool that is too small for them, and copies to the host that end late or fail.
    "host": Focus(
        lambda chance: _hosted(
            _tight(chance, 4, 10, beams=0.1, grammars=0.1, prefix_caching=True, swaps=chance.random() < 0.5),
            chance.choice((1, 2, 3)),
            transfers=[chance.choice((0.1, 0.5, 1.0)), chance.choice((0.0, 0.0, 0.2))],
            max_stores=chance.choice((8, 64)),
        ),
        {"result_lost": 0.04, "not_finite": 0.04, "abort": 0.05, "reset_cache": 0.05, "load_raises": 0.02},
        (
            "loads",
            "stored",
            "host_evicted",
            "swapped_out",
            "store_failed",
            "stale_store",
            "load_raises",
            "window_preempted",
        ),
        (None, "preempted"),
    ),
    # Blocks that another engine has computed: for prompts that wait, run or have ended, in any order, some lost, and in
    # a tier that is too small; with copies to the host that end late or fail, and resets between them.
    "receive": Focus(
        lambda chance: _hosted(
            _tight(chance, 4, 10, beams=0.1, grammars=0.1, prefix_caching=True, swaps=chance.random() < 0.5),
            chance.choice((1, 1, 2, 3)),
            transfers=[chance.choice((0.1, 0.5, 1.0)), chance.choice((0.0, 0.0, 0.2))],
            max_stores=chance.choice((8, 64)),
        ),
        {"receive": 0.5, "result_lost": 0.04, "not_finite": 0.02, "abort": 0.05, "reset_cache": 0.05},
        ("received", "received_twice", "received_without_room", "receive_late", "loads", "stored", "stale_store"),
        (None, "preempted"),
    ),
    # Prompts that a disk has from before a restart or an eviction, with reads that end late, fail or never end.
    "disk": Focus(
        lambda chance: _hosted(
            _tight(chance, 4, 10, beams=0.1, grammars=0.1, prefix_caching=True, swaps=chance.random() < 0.3),
            chance.choice((1, 2, 2)),
            transfers=[chance.choice((0.5, 1.0)), chance.choice((0.0, 0.2))],
            max_stores=chance.choice((2, 64)),
            has_disk=True,
            reads=[chance.choice((0.0, 0.05, 0.3, 0.7)), chance.choice((0.0, 0.2))],
        ),
        {"restart": 0.02, "result_lost": 0.03, "not_finite": 0.08, "abort": 0.05, "reset_cache": 0.1},
        ("disk_read", "disk_cancelled", "disk_awaited", "disk_forgotten", "received", "passed_over", "prompt_waits"),
        (None, "preempted", "unseen"),
    ),
    # Prompts with equal and different images, in a cache of the encoder that holds few, and steps that fail.
    "images": Focus(
        lambda chance: _pictured(chance, whole_images=False),
        {"result_lost": 0.03, "not_finite": 0.03, "abort": 0.05, "reset_cache": 0.03, "allocation_refused": 0.02},
        (
            *("image_encoded", "image_hit", "image_evicted", "image_cut", "image_of_adapters"),
            *("preemption", "drafts_kept"),
        ),
    ),
    # Encoder prompts, equal and different ones, in a pool that holds few, and steps that fail.
    "sources": Focus(
        lambda chance: with_sources(
            chance,
            _tight(chance, 4, 12, beams=0.2, grammars=0.1, prefix_caching=chance.random() < 0.8)
            | {"most_queued_tokens": None, "max_step_tokens": chance.choice((8, 64))},
        ),
        {"result_lost": 0.03, "not_finite": 0.03, "abort": 0.05, "reset_cache": 0.03, "allocation_refused": 0.02},
        ("source_encoded", "source_hit", "source_waits", "preemption", "beams"),
    ),
    # The same where no chunk may end inside an image, with few blocks of windowed layers.
    "whole images": Focus(
        lambda chance: _pictured(
            chance,
            whole_images=True,
            window=chance.choice((0, 1, 2, 4)),
            num_window_blocks=1 + chance.choice((0, 0, 3, 6)),
            media_longest=5,
            media_units=5 * chance.choice((1, 2, 3)),
        ),
        {"result_lost": 0.03, "not_finite": 0.03, "abort": 0.05, "reset_cache": 0.03, "allocation_refused": 0.02},
        ("image_encoded", "image_hit", "image_whole", "window_shortened", "preemption"),
    ),
    # Steps that fail in every way, one after the other.
    "failures": Focus(
        lambda chance: _tight(chance, 4, 20, beams=0.2, grammars=0.4),
        dict.fromkeys(("raise_before", "raise_after", "result_lost", "fill_raises", "grammar_raises"), 0.02)
        | dict.fromkeys(("sample_raises_before", "sample_raises_after", "request_fault", "not_finite"), 0.02)
        | {"allocation_refused": 0.02, "out_of_memory": 0.01, "sample_out_of_memory": 0.01},
        ("raise_before", "raise_after", "result_lost", "sample_raises_before", "fill_raises", "request_fault"),
    ),
}
