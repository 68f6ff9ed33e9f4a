"""Bytes that a decode step reads, by storage of weights and cache, and the least time. Nothing runs.

`python -m benchmarks.step_bytes` prints the table of docs/benchmarks.md, of Llama-3.1-8B on one H200. A step
reads each weight except the embedding once, and all keys and values of its rows' contexts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from benchmarks.shapes import SHAPES
from jaxllm.families.families import read_spec
from jaxllm.model import decoder
from jaxllm.model.parameters import Scheme, Weight
from jaxllm.model.spec import Spec
from pallas_kernels.linear.numbers import PACKED

BANDWIDTH = 4.3e12  # bytes per second: measured on an H200; data sheet 4.8
ROWS, CONTEXT = (1, 64, 256), 1024
SCALE = 4  # bytes: scales of weights and of cached vectors are float32
WIDE = 2  # bytes of bfloat16


@dataclass(frozen=True)
class Stored:
    """The storage of the layers' matrices, and whether the head is stored alike."""

    name: str
    scheme: Scheme | None
    has_head: bool = False


STORED = (
    Stored("bf16", None),
    Stored("int8", Scheme("int8"), has_head=True),
    Stored("fp8", Scheme("float8")),
    Stored("w4a16", Scheme("int4", group=128)),
)


def weight_bytes(spec: Spec, stored: Stored) -> int:
    """Return the bytes of all weights that a step reads, on one device."""
    declared = decoder.declare(spec)
    head = "embed" if spec.tie_embeddings else "head"
    top = sum(
        _bytes(weight, stored.scheme if stored.has_head else None)
        for name, weight in declared.top.items()
        if name not in ("embed", "positions", "token_types") or name == head
    )
    return top + sum(_bytes(weight, stored.scheme) for layer in declared.layers for weight in layer.values())


def _bytes(weight: Weight, scheme: Scheme | None) -> int:
    if scheme is None or not weight.is_product:
        return WIDE * math.prod(weight.shape)
    rows, columns = weight.shape
    return rows * columns // (2 if scheme.kind in PACKED else 1) + SCALE * rows * (columns // (scheme.group or columns))


def cache_bytes(spec: Spec, tokens: int, is_eight_bit: bool) -> int:
    """Return the bytes of the keys and values of `tokens` tokens; 8-bit vectors have a scale each."""
    vector = spec.head_size + SCALE if is_eight_bit else WIDE * spec.head_size
    return 2 * spec.num_layers * spec.num_kv_heads * tokens * vector


def lines() -> Iterator[str]:
    """Yield the lines of the table, gigabytes and milliseconds."""
    spec, _ = read_spec(dict(SHAPES["llama-3.1-8b"]))
    yield "| weights | keys and values | weights, GB | " + " | ".join(f"rows {rows}, GB | ms" for rows in ROWS) + " |"
    yield "| --- " * (3 + 2 * len(ROWS)) + "|"
    for is_eight_bit, stored in product((False, True), STORED):
        weights = weight_bytes(spec, stored)
        cells = [stored.name, "fp8" if is_eight_bit else "bf16", f"{weights / 1e9:.2f}"]
        for rows in ROWS:
            read = weights + cache_bytes(spec, rows * CONTEXT, is_eight_bit)
            cells += [f"{read / 1e9:.2f}", f"{1e3 * read / BANDWIDTH:.2f}"]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(lines()))
