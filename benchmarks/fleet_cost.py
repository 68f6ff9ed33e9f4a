"""The cost of a fleet's front end: tokens per second of two replicas behind it, against two separate engines.

`python -m benchmarks.fleet_cost`. Two cores are too few for two engines, a front end and clients, so a replica's
device is simulated: a step of 64 rows sleeps for 15 ms (about an 8B step on a GPU). Every request streams 128 tokens,
one per output; clients are coroutines in the front end's process, or in the engine's if separate.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from typing import Any

from benchmarks.aims import require
from benchmarks.pretend_node import DELTAS, PROMPT, ROWS, PretendEngine
from jaxllm.fleet.fleet_llm import FleetLLM

MOST_COST = 0.10


async def tokens_a_second(engine: Any, count: int, seconds: float) -> float:
    """Stream `count` requests at once for `seconds`; return the tokens per second."""
    made, end = 0, time.monotonic() + seconds

    async def client(name: int) -> None:
        nonlocal made
        while time.monotonic() < end:
            async for output in engine.generate({"prompt_token_ids": PROMPT}, DELTAS, f"{name}-{time.monotonic()}"):
                made += len(output.outputs[0].token_ids)

    began = time.monotonic()
    await asyncio.gather(*map(client, range(count)))
    return made / (time.monotonic() - began)


async def apart(seconds: float) -> float:
    """Measure one engine alone."""
    engine = PretendEngine()
    await engine.start()
    return await tokens_a_second(engine, ROWS, seconds)


async def together(seconds: float) -> float:
    """Measure two engines with a front end."""
    fleet = FleetLLM(data_parallel_size=2, skip_tokenizer_init=True, module="benchmarks.pretend_node")
    async with fleet:
        return await tokens_a_second(fleet, 2 * ROWS, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--apart", action="store_true", help="be one of two engines")
    options = parser.parse_args()
    if options.apart:
        print(asyncio.run(apart(options.seconds)))
        return
    command = [sys.executable, "-m", "benchmarks.fleet_cost", "--apart", "--seconds", str(options.seconds)]
    engines = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    alone = sum(float(engine.communicate()[0]) for engine in engines)
    both = asyncio.run(together(options.seconds))
    print(f"two engines apart: {alone:.0f} tokens a second, behind a front end {both:.0f}: {both / alone:.3f} of it")
    require(both >= (1 - MOST_COST) * alone, "the front end costs more than is promised")


if __name__ == "__main__":
    main()
