"""Three workloads of a fleet, each about the capacity of `num_replicas` replicas, deterministic for a seed."""

from __future__ import annotations

import itertools
import json
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.bench.datasets import make_jobs
from jaxllm.bench.workload import DatasetOptions
from tests.fleet.replica import Asked

VOCABULARY = 30_000
# Requests per second and replica, or conversations.
SKEWED_RATE, CONVERSATION_RATE, TRACE_RATE = 30, 8, 14
PREFIXES, PREFIX, OWN, ANSWER = 8, 1024, 64, 64  # prefixes for each replica; tokens
TRACE_BLOCK = 512  # tokens of a block of Mooncake's traces …
SCALE = 8  # … and the divisor of its lengths


def _tokens(random: np.random.Generator, count: int) -> array[int]:
    return array("i", random.integers(0, VOCABULARY, count).astype(np.int32).tobytes())


def _arrivals(random: np.random.Generator, rate: float, count: int) -> list[float]:
    return np.cumsum(random.exponential(1 / rate, count)).tolist()


def skewed(num_replicas: int, count: int, seed: int) -> list[Asked]:
    """Prefixes of 1,024 tokens with Zipf's popularity: the n-th occurs 1/n times as often as the first."""
    random = np.random.default_rng(seed)
    prefixes = [_tokens(random, PREFIX) for _ in range(PREFIXES * num_replicas)]
    popularity = 1 / np.arange(1, len(prefixes) + 1)
    drawn = random.choice(len(prefixes), count, p=popularity / popularity.sum())
    arrivals = _arrivals(random, SKEWED_RATE * num_replicas, count)
    return [
        Asked(number, prefixes[prefix] + _tokens(random, OWN), _tokens(random, ANSWER), arrival)
        for number, (prefix, arrival) in enumerate(zip(drawn.tolist(), arrivals, strict=True))
    ]


def conversations(num_replicas: int, count: int, seed: int) -> list[Asked]:
    """Conversations of four turns on average after a shared prompt of 256 tokens; users pause for two seconds."""
    random = np.random.default_rng(seed)
    system = _tokens(random, 256)
    asked: list[Asked] = []
    left = count
    for start in _arrivals(random, CONVERSATION_RATE * num_replicas, count):
        turns: list[tuple[array[int], array[int]]] = []
        before = system
        for _ in range(min(int(random.geometric(1 / 4)), left)):
            prompt = before + _tokens(random, int(random.integers(50, 350)))
            turns.append((prompt, _tokens(random, int(random.integers(20, 140)))))
            before = prompt + turns[-1][1]
        turn = None
        for prompt, answer in reversed(turns):
            left -= 1
            is_first = prompt is turns[0][0]
            turn = Asked(left, prompt, answer, start if is_first else float(random.exponential(2.0)), turn)
        asked += [turn] if turn else []
    return asked


class _Coder:
    """A tokenizer with the methods that `jaxllm.bench` needs to draw tokens."""

    ids = range(VOCABULARY)

    def is_text(self, token_id: int) -> bool:
        return True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError  # prompts are tokens here

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        raise NotImplementedError


def trace_records(count: int, seed: int) -> list[dict[str, Any]]:
    """Write a trace with the statistics of Mooncake's `conversation_trace.jsonl` (kvcache-ai/Mooncake).

    Mooncake's prompts have 12,035 tokens on average, half of them fewer than 6,909; answers have 343. The first block
    is the same in all requests; 39 % of the requests match more than that, and 37 % of all blocks repeat earlier ones.
    """
    random = np.random.default_rng(seed)
    numbers = itertools.count(1)
    ended: deque[tuple[list[int], int]] = deque(maxlen=1000)  # full blocks and tokens of prompt and answer
    records = []
    for timestamp in np.cumsum(random.exponential(294, count)):
        blocks, before = [0], 0
        if ended and random.random() < 0.39:
            at = int(random.integers(len(ended)))
            blocks, before = ended[at]
            del ended[at]
        own = np.exp(random.normal(0, 1.05)) * (1500 if before else 6000)
        num_in, num_out = before + min(100_000, max(600, int(own))), int(random.integers(3, 683))
        hashes = [*blocks, *(next(numbers) for _ in range(-(-num_in // TRACE_BLOCK) - len(blocks)))]
        names = "timestamp", "input_length", "output_length", "hash_ids"
        records.append(dict(zip(names, (int(timestamp // 3000 * 3000), num_in, num_out, hashes), strict=True)))
        if num_in < 60_000:
            ended.append((hashes[: num_in // TRACE_BLOCK], num_in + num_out))
    return records


def _read(source: Path, count: int) -> list[dict[str, Any]]:
    with source.open() as file:
        return [json.loads(line) for line in itertools.islice(file, count)]


def trace(folder: Path, num_replicas: int, count: int, seed: int, source: Path | None = None) -> list[Asked]:
    """Read requests of a trace in Mooncake's format, like `jaxllm bench serve --dataset-name timed_trace`.

    Lengths are divided by `SCALE`, and times are scaled so that a replica's load equals that of the other workloads.
    """
    records = trace_records(count, seed) if source is None else _read(source, count)
    size = TRACE_BLOCK // SCALE
    times = np.asarray([record["timestamp"] for record in records], np.float64)
    scale = count / (TRACE_RATE * num_replicas) / max((times[-1] - times[0]) / 1000, 1)
    path = folder / "trace.jsonl"
    with path.open("w") as file:
        for record, time in zip(records, ((times - times[0]) * scale).tolist(), strict=True):
            lengths = {name: -(-record[name] // SCALE) for name in ("input_length", "output_length")}
            file.write(json.dumps({**record, **lengths, "timestamp": time}) + "\n")
    options = DatasetOptions(
        dataset_name="timed_trace",
        dataset_path=str(path),
        num_prompts=count,
        seed=seed,
        timed_trace_block_size=size,
    )
    random = np.random.default_rng(seed)
    return [
        Asked(number, array("i", [*map(int, job.prompt)]), _tokens(random, job.max_tokens), job.arrival_s or 0.0)
        for number, job in enumerate(make_jobs(options, _Coder(), as_text=False))
    ]


MIXES = "skewed", "conversations", "trace"


def make(mix: str, num_replicas: int, count: int, seed: int, folder: Path, source: Path | None = None) -> list[Asked]:
    """Make a workload by its name; `folder` is for files, `source` a trace to read instead of a generated one."""
    if mix == "trace":
        return trace(folder, num_replicas, count, seed, source)
    return {"skewed": skewed, "conversations": conversations}[mix](num_replicas, count, seed)
