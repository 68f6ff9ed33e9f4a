"""A replica in virtual time: the production scheduler, and a fake device that takes time and returns fixed answers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxllm.scheduler import block_pool, scheduler
from jaxllm.scheduler.state import BlockEvent, Limits, Plan, Request, initial, take_block_events

STEP, TOKEN = 0.006, 0.00004  # seconds per step, and per token of it: a model of 8B on a GPU
ROOT = block_pool.content_root()
LIMITS = Limits(
    num_slots=64, num_blocks=4096, block_size=16, max_step_tokens=2048, max_step_chunks=16, records_blocks=True
)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A client's request, and its expected answer."""

    number: int
    prompt: array[int]
    answer: array[int]
    arrival: float = 0.0  # seconds
    follow_up: Asked | None = None  # its next turn, sent `arrival` seconds after the answer


@dataclass(frozen=True, slots=True)
class Yield:
    """Results of a step."""

    events: tuple[BlockEvent, ...]
    counts: Mapping[int, int]  # new tokens, by request number
    finished: Mapping[int, array[int]]  # all tokens of each finished request
    admitted: Mapping[int, int]  # cached tokens of each admitted request


@dataclass(eq=False)
class Replica:
    """One engine. A step is a call of `begin`, which returns its seconds, and a call of `end`."""

    number: int
    limits: Limits = LIMITS
    live: dict[int, tuple[Asked, array[int]]] = field(default_factory=dict)  # by request number, with its tokens
    plan: Plan | None = None  # plan of the running step

    def __post_init__(self) -> None:
        self.state = initial(self.limits)

    def add(self, asked: Asked) -> None:
        """Add a request."""
        tokens = array("i", asked.prompt)
        self.live[asked.number] = asked, tokens
        limit = len(tokens) + len(asked.answer)
        request = Request(sequence_id=asked.number, tokens=tokens, num_prompt=len(tokens), limit=limit, root=ROOT)
        self.state = scheduler.add(self.state, self.limits, [request])

    def begin(self, now: float) -> float | None:
        """Begin a step and return its seconds; None without live requests."""
        if not self.live:
            return None
        self.state, self.plan = scheduler.plan(self.state, self.limits, now)
        return STEP + TOKEN * self.plan.num_tokens

    def end(self) -> Yield:
        """End the running step."""
        plan = self.plan
        assert plan is not None
        self.plan = None
        ids = self.state.slots.ids[plan.slots].tolist()
        ends = (plan.starts + plan.lengths).tolist()
        sampled = np.zeros(len(ids), np.int32)
        for row, (number, end) in enumerate(zip(ids, ends, strict=True)):
            if plan.samples[row]:
                asked = self.live[number][0]
                sampled[row] = asked.answer[end - len(asked.prompt)]
        self.state, events = scheduler.commit(self.state, self.limits, plan, sampled)
        counts = dict(zip(events.ids.tolist(), events.counts.tolist(), strict=True))
        for number, token in zip(counts, events.tokens.tolist(), strict=True):
            self.live[number][1].append(token)
        finished = {number: self.live.pop(number)[1] for number in events.finished}
        admitted = {admission.request.sequence_id: admission.num_cached for admission in plan.admitted}
        self.state, blocks = take_block_events(self.state)
        return Yield(blocks, counts, finished, admitted)


def digests_of(tokens: array[int], size: int) -> list[bytes]:
    """Return the digests of the full leading blocks of a prompt, like a front end."""
    digests, parent = [], ROOT
    for start in range(0, len(tokens) - size + 1, size):
        parent = block_pool.chain(parent, tokens[start : start + size].tobytes())
        digests.append(parent)
    return digests
