"""Plays a seed in a worker process, and sums up the results of seeds."""

from __future__ import annotations

import gc
import itertools
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

LEAST_PER_MILLION = 1000  # times that each kind of fault must happen, except the kinds below
SEEDS_COLLECTED = 8  # at once: worlds have many reference cycles, and a collection takes 5% of a seed's time
# Kinds that are expensive, or need two events at once:
FOCUSED = (  # reached by the traces of focus.py
    *("late_ended", "late_preempted", "beam_group_readmitted", "burst_10000"),
    *("load_raises", "stale_store", "forgotten_store"),
    *("receive", "receive_late", "received", "received_twice", "received_without_room"),
    *(
        "disk_awaited",
        "disk_cancelled",
        "disk_forgotten",
        "source_part_hit",
        "source_waits",
        "window_preempted",
        "image_of_adapters",
    ),
)
RARE = ("abort_preempted", "disconnect_preempted", "beam_group_preempted")


@dataclass
class Tally:
    """The results of some seeds."""

    seeds: int = 0
    steps: int = 0
    seconds: float = 0.0  # of one core
    fired: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)
    digest: int = 0

    def add(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.steps += other.steps
        self.seconds += other.seconds
        self.fired += other.fired
        self.failed += other.failed
        self.digest ^= other.digest

    def rare(self) -> dict[str, int]:
        """Return the kinds of faults that happened less often than is promised."""
        least = LEAST_PER_MILLION * self.steps / 1e6
        kinds = sorted(self.fired.keys() - {*RARE, *FOCUSED})
        return {kind: self.fired[kind] for kind in kinds if self.fired[kind] < least}

    def __str__(self) -> str:
        speed = self.steps / max(self.seconds, 1e-9)
        rare = ", ".join(f"{kind} {count}" for kind, count in self.rare().items())
        kinds = f"{len(self.fired)} kinds of faults and edges" + (f" (rarer than promised: {rare})" if rare else "")
        return (
            f"simulation: {self.steps:,} steps of {self.seeds:,} seeds, {len(self.failed)} failed, "
            f"{sum(self.fired.values()):,} faults of {kinds}, {speed:,.0f} steps a second of a core, "
            f"state {self.digest:08x}"
        )


_played = itertools.count(1)


def play(seed: int) -> Tally:
    """Play one seed; print the error if it fails."""
    from tests.simulation.trace import make_trace
    from tests.simulation.world import World  # imported after JAX_PLATFORMS is set

    began = time.process_time()
    world = World(make_trace(seed))
    failed = []
    try:
        world.play()
    except Exception:
        failed = [seed]
        traceback.print_exc(limit=-6)
    digest = (world.digest * 0x9E3779B1 + seed) & 0xFFFFFFFF
    tally = Tally(1, world.num_steps, 0.0, world.fired, failed, digest)
    del world
    if next(_played) % SEEDS_COLLECTED == 0:
        gc.collect()
    tally.seconds = time.process_time() - began
    return tally


def prepare() -> None:
    """Prepare a process: exclude imported objects from garbage collection, which `play` runs from now on."""
    import tests.simulation.world  # noqa: F401
    from tests.support import accounts

    accounts.watch()
    gc.collect()
    gc.freeze()
    gc.disable()
