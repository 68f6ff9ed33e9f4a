"""Replacements for the threads, conditions and tracing of production code; and the recorder of the simulation."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.engine.engine_thread import EngineThread
from jaxllm.scheduler.state import Events, Fork, Plan
from tests.simulation.device import Violation
from tests.simulation.reference import Reference

if TYPE_CHECKING:
    from tests.simulation.world import World


class InjectedError(RuntimeError):
    """An injected fault."""


_nothing = nullcontext()


def no_span(*_: object, **__: object) -> nullcontext[None]:
    """Replace spans of tracing, which would take 1% of the time."""
    return _nothing


class Condition:
    """Replaces the condition of the inbox; it never waits, because the world runs the engine only when it has work."""

    is_notified = False

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...

    def wait(self) -> None:
        raise Violation("the engine's thread went to sleep over work")

    def notify(self) -> None:
        self.is_notified = True


class SimulatedThread(EngineThread):
    """The engine's thread as a generator, of which the world runs one iteration at a time."""

    world: World

    def start(self) -> None:
        self.running = self.turns()

    def join(self, timeout: float) -> bool:
        if self.world.is_asleep and not self.world.condition.is_notified:
            raise Violation("the engine's thread was not woken to end")
        for _ in self.running:
            pass
        return True

    def call_back(self, function: Any, *arguments: Any) -> None:
        if function == self._listeners.deliver:
            self.world.note_outputs(arguments[0])
        super().call_back(function, *arguments)


class Recorder(Reference):
    """The naive scheduler, with counters of events and the expected metrics for the world."""

    world: World

    def planned(self, plan: Plan) -> None:
        beam_groups, readmitted = len(self.beam_groups), self.num_readmitted
        places, counts = self.places, (self.num_skipped, self.places.num_drained, self.places.num_evicted)
        super().planned(plan)
        world = self.world
        world.fired["beam_group_preempted"] += bool(plan.preempted) and len(self.beam_groups) < beam_groups
        world.fired["beam_group_readmitted"] += self.num_readmitted > readmitted
        for kind, before, after in zip(
            ("adapter_skipped", "adapter_drained", "adapter_evicted"),
            counts,
            (self.num_skipped, places.num_drained, places.num_evicted),
            strict=True,
        ):
            world.fired[kind] += after > before
        world.fired += self.drafting + self.late + self.windows + self.ticks + self.host.fired
        self.drafting.clear()
        self.windows.clear()
        self.ticks.clear()
        self.host.fired.clear()
        world.fired += self.encoder.fired + self.sources.fired
        self.encoder.fired.clear()
        self.sources.fired.clear()
        self.late.clear()
        for part in (plan.slots, plan.starts, plan.lengths, plan.table, plan.moves):
            world.digest = zlib.crc32(part.tobytes(), world.digest)
        world.fired["beam_copies"] += int((plan.moves[:, 1] == plan.moves[:, 3]).sum())
        world.plans.append(plan)
        world.fired["preemption"] += len(plan.preempted)
        world.counted = []
        for admission in plan.admitted:
            client = world.client_of[admission.request.sequence_id]
            if client not in world.was_admitted:
                world.was_admitted.add(client)
                world.cached_of[client.name] = admission.num_cached
                world.prompt_tokens += len(client.ids)
                world.cached_tokens += admission.num_cached
                world.counted.append((admission.request.sequence_id, client, admission.num_cached))

    def was_reset(self) -> None:
        if self.running and not self.world.is_recovering:
            raise Violation("the cache is reset under requests that run")
        if self.world.engine._in_flight:
            raise Violation("the cache is reset under a step in flight, which a replay would not know")
        super().was_reset()

    def forked(self, moves: Sequence[Fork]) -> None:
        super().forked(moves)
        self.world.fired["beam_forks"] += any(move.source != move.target for move in moves)

    def committed(
        self,
        plan: Plan,
        tokens: np.ndarray,
        is_finite: np.ndarray | None,
        counts: np.ndarray | None,
        sampled: np.ndarray | None,
        events: Events,
    ) -> None:
        num_forced = self.num_forced
        super().committed(plan, tokens, is_finite, counts, sampled, events)
        self.world.fired["forced"] += self.num_forced > num_forced
        self.world.last_commit = plan, tokens, is_finite, counts, sampled
