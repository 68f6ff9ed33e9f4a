"""Tune the Triton kernels on this GPU and update tuning.json.

`python -m pallas_kernels.tune [--operation paged_decode] [--head-size 128] [--cache-bits 16] [--dry]`. Each row of the
table is measured on one representative shape, and written immediately, so interrupted runs keep their results.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import measuring, tuning
from pallas_kernels.choice import Choice, capability_of

HEADS = {64: (14, 2, 64), 128: (32, 8, 128), 256: (16, 8, 256)}  # Qwen2.5-0.5B, Llama 3 8B, Gemma 2 9B
DTYPES = {32: ("float32", "float32"), 16: ("bfloat16", "bfloat16"), 8: ("bfloat16", "int8")}  # queries, cache
DECODE, PREFILL = (16, 8192), (1, 8192)  # rows and tokens
CHOICES: dict[str, dict[str, tuple[int, ...]]] = {
    "paged_decode": {"keys": (16, 32, 64, 128), "warps": (4, 8), "stages": (2, 3, 5)},
    "paged_prefill": {"rows": (16, 32, 64, 128), "keys": (16, 32, 64, 128), "warps": (4, 8), "stages": (2, 3)},
}
TURNS = 10

Row = dict[str, Any]


def candidates(row: Row) -> list[dict[str, int]]:
    """Return the settings to try: the row's, then those within a factor of two.

    Those that exceed a GPU fail to compile.
    """
    choices = CHOICES[row["operation"]]
    near = {
        name: [number for number in sizes if name in ("warps", "stages") or row[name] / 2 <= number <= row[name] * 2]
        for name, sizes in choices.items()
    }
    own = {name: row[name] for name in choices}
    found = [dict(zip(near, sizes, strict=True)) for sizes in itertools.product(*near.values())]
    return [own, *(setting for setting in found if setting != own)]


def tune(row: Row, capability: int, progress: Any = print) -> Row:
    queries, cached = DTYPES[row["cache_bits"]]
    heads = HEADS[row["head_size"]]
    make = measuring.decode if row["operation"] == "paged_decode" else measuring.prefill
    rows, tokens = DECODE if row["operation"] == "paged_decode" else PREFILL
    best: tuple[float, dict[str, int]] | None = None
    for candidate in candidates(row):
        with using(row, candidate):
            case = make(heads, rows, tokens, queries, cached)
            try:
                taken = measuring.seconds(case.step(Choice("triton", capability)), case.arrays, TURNS)
            except Exception as error:  # exceeds shared memory or registers
                progress(f"  {candidate}: {type(error).__name__}: {str(error).strip().splitlines()[0]:.90}")
                continue
        progress(f"  {candidate}: {1e6 * taken:.1f} us")
        if best is None or taken < best[0]:
            best = taken, candidate
    if best is None:
        return row
    measured = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "triton": importlib.metadata.version("triton"),
        "microseconds": round(1e6 * best[0], 1),
    }
    return row | best[1] | {"measured": measured}


@contextmanager
def using(row: Row, candidate: dict[str, int]) -> Iterator[None]:
    before = dict(row)
    row.update(candidate)
    try:
        yield
    finally:
        row.update(before)


def write(table: Sequence[Row], path: Path = tuning.PATH) -> None:
    lines = ",\n".join(f"  {json.dumps(row)}" for row in table)
    path.write_text(f"[\n{lines}\n]\n" if lines else "[]\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=__doc__)
    parser.add_argument("--operation", choices=CHOICES, action="append", help="only this one (may be repeated)")
    parser.add_argument("--head-size", type=int, choices=HEADS, action="append", help="only rows of such heads")
    parser.add_argument("--cache-bits", type=int, choices=DTYPES, action="append", help="only rows of such caches")
    parser.add_argument("--dry", action="store_true", help="list the candidates; compile and measure nothing")
    options = parser.parse_args(arguments)
    wanted = {"operation": options.operation, "head_size": options.head_size, "cache_bits": options.cache_bits}
    device = jax.devices()[0]
    capability = capability_of(device) if device.platform == "gpu" else None
    if capability is None and not options.dry:
        print(f"nothing to tune: JAX sees no NVIDIA GPU here, only {device.device_kind}", file=sys.stderr)
        return 1
    generation = None if capability is None else tuning.generation(capability)
    table = tuning.table()
    for number, row in enumerate(table):
        if any(of is not None and row[name] not in of for name, of in wanted.items()):
            continue
        if generation is not None and row["capability"] != generation:
            continue
        name = "{operation}, capability {capability}, heads of {head_size}, {cache_bits} bits".format(**row)
        if options.dry or capability is None:
            print(f"{name}: {' '.join(map(_short, candidates(row)))}")
            continue
        print(name, flush=True)
        table[number] = tune(row, capability, lambda line: print(line, flush=True))
        write(table)
        print(f"  taken: {_short({one: table[number][one] for one in CHOICES[row['operation']]})}", flush=True)
    return 0


def _short(candidate: dict[str, int]) -> str:
    tile = "x".join(str(candidate[name]) for name in ("rows", "keys") if name in candidate)
    return f"{tile}/{candidate['warps']}w{candidate['stages']}s"


if __name__ == "__main__":
    sys.exit(main())
