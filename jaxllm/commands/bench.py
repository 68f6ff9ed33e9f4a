"""`jaxllm bench`: measure a server, the engine or a part of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from jaxllm.commands import (
    bench_compare,
    bench_explain,
    bench_kernels,
    bench_latency,
    bench_scheduler,
    bench_serve,
    bench_startup,
    bench_sweep,
    bench_throughput,
)
from jaxllm.commands.arguments import Subparsers

BENCHMARKS: Mapping[str, ModuleType] = {
    "serve": bench_serve,
    "throughput": bench_throughput,
    "latency": bench_latency,
    "startup": bench_startup,
    "scheduler": bench_scheduler,
    "kernels": bench_kernels,
    "explain": bench_explain,
    "compare": bench_compare,
    "sweep": bench_sweep,
}


def add(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure a server, the engine or a part of it",
        allow_abbrev=False,
        description="Measure a server, the engine or a part of it.",
    )
    benchmarks = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK", dest="benchmark")
    for benchmark in BENCHMARKS.values():
        benchmark.add(benchmarks)
