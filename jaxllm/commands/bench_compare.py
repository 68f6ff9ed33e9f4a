"""`jaxllm bench compare`: compare results, with confidence intervals."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.commands.arguments import Subparsers, UsageError, new_command
from jaxllm.commands.bench_results import add_number, add_output, check_output, write
from jaxllm.errors import UserError


def add(benchmarks: Subparsers) -> None:
    parser = new_command(benchmarks, "compare", run, "compare two results")
    parser.description = (
        "Show the ratio B/A of every figure that both results have. With one file for each side, intervals "
        "come from its details (bench serve --save-detailed); with several, from the differences between runs."
    )
    parser.add_argument("files", nargs="*", metavar="JSON", help="A.json B.json")
    parser.add_argument("--a", nargs="+", metavar="JSON", help="result files of side A, instead of A.json")
    parser.add_argument("--b", nargs="+", metavar="JSON", help="result files of side B")
    parser.add_argument(
        "--confidence",
        type=float,
        default=0.95,
        metavar="SHARE",
        help="confidence level of the intervals (default: 0.95)",
    )
    add_number(parser, "--seed", 0, "seed of the resampling", least=0)
    add_output(parser, has_plot=False)


def run(options: dict[str, Any]) -> int:
    files, a, b = options["files"], options["a"], options["b"]
    if (len(files), a, b) != (2, None, None) and (files or not a or not b):
        raise UsageError("give two files, or the files of each side with --a and --b")
    check_output(options)
    from jaxllm.bench import compare

    first, second = ([_read(path) for path in side] for side in ((a, b) if a else (files[:1], files[1:])))
    found = compare.compare(first, second, options["confidence"], options["seed"])
    for line in compare.differences(first, second):
        print(f"jaxllm: the results differ in {line}", file=sys.stderr)
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
