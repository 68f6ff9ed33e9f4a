"""Runs every benchmark with a promised figure: `python -m benchmarks [--long] [NAME …]`.

The short version is a quick look; docs/benchmarks.md has figures of the long one. Missed aims are listed at the end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.against_transformers import TORCH


class Measurement(NamedTuple):
    """One benchmark: its command, and the arguments that shorten it."""

    command: Sequence[str]
    short: Sequence[str] | None = ()  # None: left out of the short version


def _bench(module: str, *flags: str, is_long: bool = False) -> Measurement:
    return Measurement(["-m", f"benchmarks.{module}"], None if is_long else flags)


LAYERS = "6"  # of the 0.5B shape's 24, in the short version: a quarter of the compilation
FRONT_ENDS = "benchmarks.serving --model qwen2.5-0.5b --streams 64 --tokens 16 --limit 0.15"
MEASUREMENTS = {
    "scheduler": Measurement(
        ["-m", "jaxllm", "bench", "scheduler", "--num-requests", "1000", "--load", "decode", "--limit-us", "250"]
    ),
    "padding": _bench("padding"),
    "stages": _bench("pipeline_bubble"),
    "host": _bench("host"),
    "dispatch": _bench("dispatch"),
    "record": _bench("record", "--steps", "200"),
    "start": Measurement(
        ["-m", "jaxllm", "bench", "startup", "--limit-cold", "15", "--limit-warm", "5"], ["--num-iters", "1"]
    ),
    "overlap": _bench("overlap", is_long=True),
    "bare": _bench("bare", "--layers", LAYERS, "--rounds", "3"),
    "quantized": _bench("quantized", "--layers", LAYERS, "--rounds", "3"),
    "adapters": _bench("adapters", "--layers", LAYERS, "--rounds", "3"),
    "constrained": _bench("constrained", "--rounds", "3"),
    "deterministic": _bench("deterministic", is_long=True),
    "fleet_cost": _bench("fleet_cost", "--seconds", "5"),
    "fleet": _bench("fleet", is_long=True),
    "prefix_cache": _bench("prefix_cache", "--requests", "60", "--rounds", "3"),
    "random_serving": _bench("random_serving", "--requests", "12", "--rounds", "1"),
    # The short version uses the embedded model: a server of the 0.5B shape compiles for minutes before it is steady.
    "front_ends": Measurement(
        ["-m", *FRONT_ENDS.split()], ["--model", "embedded", "--tokens", "64", "--rounds", "3", "--limit", "0.35"]
    ),
    "serving": Measurement(["-m", "benchmarks.serving"], None),
    "compiling": _bench("compiling", is_long=True),
    "speculation": _bench("speculation", is_long=True),
    "memory_speed": _bench("memory_speed", is_long=True),
    "embedding": _bench("embedding", "--rounds", "3"),
    "against_transformers": _bench("against_transformers", "--dtype", "float32", "--rounds", "1"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASUREMENTS))
    parser.add_argument("--long", action="store_true", help="as many rounds as docs/benchmarks.md")
    options = parser.parse_args()
    # Not argparse's `choices`: with nargs="*" Python 3.11 checks the empty list against them.
    for name in options.names:
        if name not in MEASUREMENTS:
            parser.error(f"{name} is none of {', '.join(MEASUREMENTS)}")
    behind = []
    for name in options.names or MEASUREMENTS:
        if name in ("against_transformers", "embedding") and not TORCH.exists():
            print(f"== {name}: left out, `make {TORCH.parents[1].name}/.parity` makes the environment with torch")
            continue
        measurement = MEASUREMENTS[name]
        if measurement.short is None and not options.long and not options.names:
            print(f"== {name}: left out of the short version")
            continue
        command = [sys.executable, *measurement.command, *(() if options.long else measurement.short or ())]
        print(f"== {name}", flush=True)
        began = time.monotonic()
        ended = subprocess.run(command, check=False)
        print(f"== {name} took {time.monotonic() - began:.0f} s", flush=True)
        if ended.returncode:
            behind.append(name)
    if behind:
        print(f"behind their aims: {', '.join(behind)}")
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
