"""The gain of several GPUs, computed from the bytes that they read and exchange. Nothing runs.

`python -m benchmarks.scaling` prints the tables of docs/scaling.md, of Llama 3.1 on H200s. A step reads each
weight once and all keys and values of its rows, and sums two vectors per row and layer, and the embedding, over the
devices. Matrix products are excluded: at 2,048 rows of 8B over eight devices they take 5 ms, and reading 8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from benchmarks.shapes import SHAPES
from benchmarks.step_bytes import BANDWIDTH, CONTEXT, STORED, WIDE, Stored, cache_bytes, weight_bytes
from jaxllm.config import EngineConfig
from jaxllm.families.families import read_spec
from jaxllm.model.spec import Spec

MEMORY = 141e9  # bytes of an H200, by its data sheet
LINK = 450e9  # bytes per second of NVLink 4 in each direction, by the data sheet
LATENCY = 10e-6  # least seconds of an all-reduce: assumed, not measured
SHARE = EngineConfig(model="").gpu_memory_utilization
GPUS = 8
ROWS = (64, 512, 2048)  # of all replicas together
LARGE = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
SMALL_SPEC, LARGE_SPEC = (read_spec(dict(SHAPES["llama-3.1-8b"]) | more)[0] for more in ({}, LARGE))


def held_bytes(spec: Spec, stored: Stored) -> int:
    """Return the bytes of all weights: those that a step reads, and the embedding."""
    return weight_bytes(spec, stored) + WIDE * spec.vocab_size * spec.width


def least_gpus(spec: Spec, stored: Stored) -> int:
    """Return the least power of two of GPUs that hold the weights and leave a fifth of their memory for the cache."""
    return next(count for count in (1, 2, 4, 8) if held_bytes(spec, stored) / count <= 0.8 * SHARE * MEMORY)


def seconds(spec: Spec, rows: int, shards: int) -> tuple[float, float]:
    """Return the least seconds that a bfloat16 step of one replica reads, and that it exchanges."""
    read = (weight_bytes(spec, STORED[0]) + cache_bytes(spec, rows * CONTEXT, False)) / shards / BANDWIDTH
    if shards == 1:
        return read, 0.0
    vectors = WIDE * rows * spec.width
    # In a ring each part passes all other devices twice.
    return read, (2 * spec.num_layers + 1) * (LATENCY + 2 * (shards - 1) / shards * vectors / LINK)


def fits() -> Iterator[str]:
    """Yield the lines of the table of weights and cache sizes."""
    yield "| model | weights | they take, GB | GPUs at least | a token's cache, KiB | tokens in these GPUs' caches |"
    yield "| --- " * 6 + "|"
    for name, spec in (("8B", SMALL_SPEC), ("70B", LARGE_SPEC)):
        for stored in (STORED[0], STORED[2]):
            held, count = held_bytes(spec, stored), least_gpus(spec, stored)
            token = cache_bytes(spec, 1, False)
            tokens = math.floor((SHARE * MEMORY * count - held) / token / 1000) * 1000
            yield f"| {name} | {stored.name} | {held / 1e9:.1f} | {count} | {token / 1024:.0f} | {tokens:,} |"


def layouts() -> Iterator[str]:
    """Yield the lines of the table of eight GPUs, divided into replicas and shards."""
    yield "| replicas × shards | " + " | ".join(f"{rows:,} rows, ms | tokens a second" for rows in ROWS) + " |"
    yield "| --- " * (1 + 2 * len(ROWS)) + "|"
    for shards in (1, 2, 4, 8):
        cells = [f"{GPUS // shards} × {shards}"]
        for rows in ROWS:
            read, exchanged = seconds(SMALL_SPEC, rows * shards // GPUS, shards)
            both = f" ({1e3 * exchanged:.1f} exchanging)" if exchanged else ""
            cells += [f"{1e3 * (read + exchanged):.1f}{both}", f"{rows / (read + exchanged):,.0f}"]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join([*fits(), "", *layouts()]))
