"""Routing of a fleet's requests against simpler rules: `python -m benchmarks.fleet`.

Fleets of 1, 4 and 64 replicas with production schedulers in virtual time (tests/fleet): a step takes 6 ms and 40 µs per
token, a pool has 4,096 blocks of 16 tokens. An eighth of the replicas is killed, an eighth drains; each returns after a
second, and requests of killed replicas run again elsewhere. Deterministic: no clock, seeded.

A cell: the share of prompt tokens found in a cache; the highest load at an instant, relative to the mean load, as met
by requests; the mean time to the first token. "Reached": of the requests with a block in any replica, the share that
`choose` sent to the replica with most of their prefix.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.aims import require
from jaxllm.fleet import choose
from tests.fleet import mixes
from tests.fleet.fleet import Fleet, Outcome, Router, least_loaded, make_changes
from tests.fleet.replica import Asked

REQUESTS = {1: 150, 4: 150, 64: 60}  # per replica, by number of replicas
REACHED, BALANCE = 0.9, 1.2  # aims for the skewed mix


def by_chance() -> Router:
    """Return a router that chooses at random."""
    draw = random.Random(0)
    return lambda digests, loads, index: draw.choice([*loads])


def in_turn() -> Router:
    """Return a round-robin router."""
    number = itertools.count()
    return lambda digests, loads, index: sorted(loads)[next(number) % len(loads)]


ROUTERS: dict[str, Callable[[], Router]] = {
    "choose": lambda: choose,
    "least loaded": lambda: least_loaded,
    "in turn": in_turn,
    "random": by_chance,
}


def play(asked: list[Asked], num_replicas: int, route: Router) -> Outcome:
    """Run a fleet in which some replicas are killed or drained, and return."""
    seconds = max(each.arrival for each in asked)
    return Fleet(route, asked, num_replicas, make_changes(num_replicas, -(-num_replicas // 8), seconds, 0)).play()


def cell(outcome: Outcome) -> str:
    """Format the figures of a fleet."""
    first = 1e3 * float(np.mean([*outcome.first_tokens.values()]))
    return f"{100 * outcome.hit_rate:.0f} %, {outcome.balance:.2f}, {first:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mix", choices=mixes.MIXES, nargs="+", default=mixes.MIXES)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a trace in Mooncake's format instead of ours")
    options = parser.parse_args()
    print(f"| mix | replicas | requests | {' | '.join(ROUTERS)} | reached |\n|{' --- |' * (len(ROUTERS) + 4)}")
    num_lost, skewed = 0, []
    for mix, size in itertools.product(options.mix, REQUESTS):
        count = size * REQUESTS[size]
        with tempfile.TemporaryDirectory() as folder:
            asked = mixes.make(mix, size, count, 0, Path(folder), options.trace)
        cells = []
        for name, make in ROUTERS.items():
            if size == 1 and name != "choose":
                cells.append("")
                continue
            outcome = play(asked, size, make())
            cells.append(cell(outcome))
            num_lost += count - sum(len(answers) == 1 for answers in outcome.answers.values())
            if name == "choose":
                reached = outcome.reached
                if mix == "skewed" and size > 1:
                    skewed.append(outcome)
        print(f"| {mix} | {size} | {count:,} | {' | '.join(cells)} | {100 * reached:.0f} % |", flush=True)
    require(not num_lost, f"{num_lost} requests were not answered once")
    require(all(outcome.reached >= REACHED for outcome in skewed), "prefixes miss the replica that has them")
    require(all(outcome.balance <= BALANCE for outcome in skewed), "the most loaded replica has too much")


if __name__ == "__main__":
    main()
