"""`jaxllm bench compare`: compare results, with confidence intervals."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.commands.arguments import Subparsers, Usage, new_command
from jaxllm.commands.bench_results import add_number, add_output, check_output, write
from jaxllm.errors import UserError


def add(benchmarks: Subparsers) -> None:
    """Add the command."""
    parser = new_command(benchmarks, "compare", run, "compare two results")
    parser.description = (
        "Show the ratio B/A of every figure that both results have. With one file a side, intervals come "
        "from their details (bench serve --save-detailed); with several, from how the runs differ."
    )
    parser.add_argument("files", nargs="*", metavar="JSON", help="A.json B.json")
    parser.add_argument("--a", nargs="+", metavar="JSON", help="runs of A, instead")
    parser.add_argument("--b", nargs="+", metavar="JSON", help="runs of B")
    parser.add_argument("--confidence", type=float, default=0.95, metavar="SHARE", help="of intervals (default: 0.95)")
    add_number(parser, "--seed", 0, "of the drawings", least=0)
    add_output(parser, has_plot=False)


def run(options: dict[str, Any]) -> int:
    """Print the ratios, and other differences to stderr."""
    files, a, b = options["files"], options["a"], options["b"]
    if (len(files), a, b) != (2, None, None) and (files or not a or not b):
        raise Usage("give two files, or those of each side with --a and --b")
    check_output(options)
    from jaxllm.bench import compare

    first, second = ([_read(path) for path in side] for side in ((a, b) if a else (files[:1], files[1:])))
    found = compare.compare(first, second, options["confidence"], options["seed"])
    for line in compare.differences(first, second):
        print(f"jaxllm: not the same: {line}", file=sys.stderr)
    print(compare.table(found, options["confidence"]))
    if options["output_json"] is not None:
        figures = {
            one.name: {"a": one.a, "b": one.b, "ratio": one.ratio, "interval": one.interval, "better": one.better}
            for one in found
        }
        write(options, {"a": a or files[:1], "b": b or files[1:], "figures": figures})
    return 0


def _read(path: str) -> Mapping[str, Any]:
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not a JSON file: {error}.") from error
    if not isinstance(result, dict):
        raise UserError(f"{path} holds no result: expected a JSON object.")
    return result
