"""`jaxllm bench scheduler`: time the scheduler alone."""

from __future__ import annotations

import sys
from typing import Any

from jaxllm.commands.arguments import Subparsers, new_command
from jaxllm.commands.bench_results import add_number, add_output, check_output, positive, write
from jaxllm.errors import EngineError

SIZES = (64, 256, 1000, 4096)
LOADS = ("decode", "turnover")


def add(benchmarks: Subparsers) -> None:
    parser = new_command(benchmarks, "scheduler", run, "measure the scheduler alone")
    parser.description = (
        "Measure the time to plan and commit a step, by the number of running requests. With --load decode, "
        "every request gets a token in each step; with turnover, some also end and new ones start."
    )
    parser.add_argument(
        "--num-requests", nargs="+", type=positive, default=SIZES, metavar="N",
        help=f"numbers of running requests (default: {' '.join(map(str, SIZES))})",
    )  # fmt: skip
    parser.add_argument("--load", nargs="+", choices=LOADS, default=LOADS, help="kinds of load (default: both)")
    add_number(parser, "--num-iters", 600, "measured steps")
    add_number(parser, "--num-iters-warmup", 100, "warm-up steps, not measured", least=0)
    add_number(parser, "--seed", 0, "seed of prompts and tokens", least=0)
    parser.add_argument("--limit-us", type=float, metavar="US", help="fail if a median exceeds this")
    add_output(parser)


def run(options: dict[str, Any]) -> int:
    check_output(options)
    from tqdm import tqdm

    from jaxllm.bench import scheduler

    steps, warmups = options["num_iters"], options["num_iters_warmup"]
    cases = [(size, load) for size in options["num_requests"] for load in options["load"]]
    with tqdm(total=len(cases) * (steps + warmups), unit="step", disable=not sys.stderr.isatty()) as bar:
        samples = {
            f"{load}_{size}": scheduler.measure(size, load, steps, warmups, options["seed"], bar.update)
            for size, load in cases
        }
    figures = scheduler.result(samples)
    print(scheduler.table(figures, cases))
    write(options, figures)
    medians = {name: figures[f"median_{name}_us"] for name in samples}
    slow = {name: value for name, value in medians.items() if value > (options["limit_us"] or float("inf"))}
    if slow:
        names = ", ".join(f"{name} takes {value:.0f} us" for name, value in slow.items())
        raise EngineError(f"{names}: more than the limit of {options['limit_us']:.0f} us a step.")
    return 0
