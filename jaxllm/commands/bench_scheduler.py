"""`jaxllm bench scheduler`: the pure core alone, at many running requests."""

from __future__ import annotations

import sys
from typing import Any

from jaxllm.commands.arguments import Subparsers
from jaxllm.commands.bench_results import add_output, check_output, natural, positive, write
from jaxllm.errors import EngineError

SIZES = (64, 256, 1000, 4096)
LOADS = ("decode", "turnover")


def add(benchmarks: Subparsers) -> None:
    """Describe the command."""
    parser = benchmarks.add_parser(
        "scheduler",
        help="measure the scheduler alone",
        allow_abbrev=False,
        description="Measure what a step's plan and commit cost while so many requests run. decode: each gets a token. "
        "turnover: some end in every step, and others take their place.",
    )
    parser.add_argument(
        "--num-requests", nargs="+", type=positive, default=SIZES, metavar="N",
        help=f"(default: {' '.join(map(str, SIZES))})",
    )  # fmt: skip
    parser.add_argument("--load", nargs="+", choices=LOADS, default=LOADS, help="(default: both)")
    parser.add_argument("--num-iters", type=positive, default=600, metavar="N", help="steps measured (default: 600)")
    parser.add_argument(
        "--num-iters-warmup", type=natural, default=100, metavar="N", help="steps before those (default: 100)"
    )
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="of prompts and tokens (default: 0)")
    parser.add_argument("--limit-us", type=float, metavar="US", help="fail if a median is above")
    add_output(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)


def run(options: dict[str, Any]) -> int:
    """Measure, show, and hold the limit."""
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
