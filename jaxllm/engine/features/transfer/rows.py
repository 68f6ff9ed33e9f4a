"""Arrived blocks: an event of the scheduler, and content of the host's tier."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from jaxllm.runner.model_runner import Runner
from jaxllm.runner.row_layout import Row
from jaxllm.scheduler.recorded import RecordedScheduler


def digest_of(about: Any) -> bytes:
    return sha256(json.dumps(about, sort_keys=True).encode()).digest()


def receive_blocks(
    scheduler: RecordedScheduler, runner: Runner, owner: int, blocks: Sequence[tuple[int, int, Row]]
) -> int:
    """Put blocks of a waiting request's prompt into the host's tier; return how many."""
    places = scheduler.receive(owner, [(group, index) for group, index, _ in blocks])
    for (group, _, row), place in zip(blocks, places, strict=True):
        if place >= 0:
            runner.receive(group, place, row)
    return sum(place >= 0 for place in places)
