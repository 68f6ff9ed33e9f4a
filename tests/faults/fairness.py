"""Measure how one client that requests nine tenths of a server's capacity slows ten small clients.

    python -m tests.faults.fairness [seconds of each side]

The ten make a tenth of the calls that the server could answer, first alone and then concurrently with the large client,
which is bounded by `--max-sequences-per-client`; the two measurements take turns. Every client has a different key.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from typing import NamedTuple

import aiohttp

from tests.faults.overload import PROMPT, quantile
from tests.support.serving_process import ServingProcess
from tests.support.sizes import SLOTS, flags

NUM_SMALL = 10
HOG = "hog"
KEYS = (HOG, *(f"small-{number}" for number in range(NUM_SMALL)))
SHARE = 2  # concurrent sequences, of eight slots
SERVER = (
    *flags(SLOTS),
    *("--max-sequences-per-client", f"{SHARE}"),
    *(part for key in KEYS for part in ("--api-key", key)),
)
TOKENS = 32  # tokens of an answer
ROUNDS = 3  # each measures both sides
MOST_SLOWDOWN = 1.5  # limit for the small clients' 99th percentile


class Side(NamedTuple):
    """Statuses and latencies of one side's calls."""

    ends: Counter[int]  # statuses
    seconds: list[float]  # latencies, in order of completion


class Fairness(NamedTuple):
    """Capacity, the small clients' calls alone and next to the large client, and the large client's calls."""

    capacity: float  # calls a second
    alone: Side
    beside: Side
    hog: Side

    def slowdown(self, share: float = 0.99) -> float:
        """Return the ratio of a percentile of the small clients' latencies with the large client to that without."""
        return quantile(self.beside.seconds, share) / quantile(self.alone.seconds, share)


async def call(http: aiohttp.ClientSession, key: str, side: Side) -> None:
    began = time.monotonic()
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
    async with http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}) as answer:
        await answer.read()
        side.ends[answer.status] += 1
        if answer.status == 200:
            side.seconds.append(time.monotonic() - began)


async def closed_loop(http: aiohttp.ClientSession, seconds: float) -> float:
    """Return the calls per second that the server answers to eight clients in closed loops."""
    side, end = Side(Counter(), []), time.monotonic() + seconds

    async def work(key: str) -> None:
        while time.monotonic() < end:
            await call(http, key, side)

    await asyncio.gather(*(work(key) for key in KEYS[:8]))
    return side.ends[200] / seconds


async def open_loop(
    http: aiohttp.ClientSession, keys: tuple[str, ...], rate: float, seconds: float, side: Side
) -> None:
    """Make calls at random intervals, `rate` per second on average, with each key in turn; wait for no answer."""
    rng, end, due = random.Random(0), time.monotonic() + seconds, time.monotonic()
    number, tasks = 0, set[asyncio.Task[None]]()
    while (due := due + rng.expovariate(rate)) < end:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        task = asyncio.ensure_future(call(http, keys[number % len(keys)], side))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        number += 1
    await asyncio.gather(*tasks)


async def measure(address: str, seconds: float, rounds: int = ROUNDS) -> Fairness:
    """Measure the small clients alone, then with the large client, in turns."""
    alone, beside, hog = (Side(Counter(), []) for _ in range(3))
    async with aiohttp.ClientSession(address, connector=aiohttp.TCPConnector(limit=0)) as http:
        await closed_loop(http, 1.0)
        capacity = await closed_loop(http, min(5.0, seconds))
        for _ in range(rounds):
            await open_loop(http, KEYS[1:], capacity / 10, seconds, alone)
            await asyncio.gather(
                open_loop(http, KEYS[1:], capacity / 10, seconds, beside),
                open_loop(http, (HOG,), capacity * 9 / 10, seconds, hog),
            )
    for side in (alone, beside, hog):
        side.seconds.sort()
    return Fairness(capacity, alone, beside, hog)


def main() -> None:
    with ServingProcess(*SERVER) as server:
        found = asyncio.run(measure(server.http, float(sys.argv[1]) if len(sys.argv) > 1 else 60.0))
    print(f"capacity: {found.capacity:.0f} calls a second of {TOKENS} tokens; a client may have {SHARE} under way")
    for name, side in (("ten alone", found.alone), ("ten beside", found.beside), ("the one", found.hog)):
        median, p99 = (1000 * quantile(side.seconds, share) for share in (0.5, 0.99))
        print(f"{name:12s} {median:6.1f} ms median {p99:6.1f} ms p99  {dict(side.ends)}")
    print(f"fairness: the ten's p99 is {found.slowdown():.2f} times what it is alone (aim: {MOST_SLOWDOWN})")
    if found.slowdown() > MOST_SLOWDOWN or set(found.beside.ends) != {200}:
        sys.exit(1)


if __name__ == "__main__":
    main()
