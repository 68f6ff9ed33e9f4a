"""`jaxllm bench kernels`: compare kernels with the reference and the memory bandwidth."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jaxllm.commands.arguments import Subparsers, new_command
from jaxllm.commands.bench_results import add_number, add_output, check_output, positive, write

DECODE = ((1, 2048), (16, 1024), (64, 256))
PREFILL = ((1, 512), (4, 128))


def add(benchmarks: Subparsers) -> None:
    parser = new_command(benchmarks, "kernels", run, "measure each implementation of each kernel")
    parser.description = (
        "Measure every implementation of attention over the cache, with the heads of Qwen2.5-0.5B and of "
        "Llama 3 8B: its largest difference from the reference, and its share of the measured memory bandwidth."
    )
    for flag, default, text in (
        ("--decode", DECODE, "rows, and cached tokens of each row"),
        ("--prefill", PREFILL, "prompts, and tokens of each prompt"),
    ):
        shown = " ".join(f"{rows}x{tokens}" for rows, tokens in default)
        parser.add_argument(
            flag, nargs="*", type=_shape, default=default, metavar="AxB", help=f"{text} (default: {shown})"
        )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="data type (default: float32)"
    )
    add_number(parser, "--num-iters", 20, "rounds")
    add_output(parser)


def run(options: dict[str, Any]) -> int:
    check_output(options)
    from tqdm import tqdm

    from jaxllm.bench import kernels

    cases = kernels.make_cases(options["dtype"], options["decode"], options["prefill"])
    with tqdm(total=len(cases) * options["num_iters"], unit="round", disable=not sys.stderr.isatty()) as bar:
        measured, reads = kernels.measure(cases, options["num_iters"], bar.update)
    text, figures = kernels.report(measured, reads)
    print(text)
    write(options, {"dtype": options["dtype"], **figures})
    return 0


def _shape(text: str) -> tuple[int, int]:
    rows, cross, tokens = text.partition("x")
    if not cross:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape as 16x1024")
    return positive(rows), positive(tokens)
