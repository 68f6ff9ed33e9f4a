"""`jaxllm bench sweep`: run a resumable grid of another benchmark."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from jaxllm.commands.arguments import Subparsers, UsageError, new_command
from jaxllm.commands.bench_results import add_number

SWEPT = ("serve", "throughput", "latency", "startup", "scheduler", "kernels", "explain")


def add(benchmarks: Subparsers) -> None:
    parser = new_command(benchmarks, "sweep", run, "run a grid of another benchmark")
    parser.description = (
        "Run another benchmark with every combination of settings, each in a separate process. A repeated "
        "command with the same folder runs only what is missing. Example: jaxllm bench sweep --out results "
        "--vary request-rate=1,2,4 --vary max-concurrency=8,16 -- serve --num-prompts 200"
    )
    parser.add_argument("arguments", nargs="+", metavar="BENCHMARK", help="the benchmark and its flags, after --")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of results, logs and the table")
    parser.add_argument(
        "--vary", action="append", default=[], metavar="FLAG=A,B", help="values of a flag; may be repeated"
    )
    parser.add_argument(
        "--bench-params", metavar="FILE", help="JSON or YAML: a list of settings as in vLLM, or an object of lists"
    )
    add_number(parser, "--num-runs", 1, "runs of each cell")
    parser.add_argument("--dry-run", action="store_true", help="only show the command lines")


def run(options: dict[str, Any]) -> int:
    from tqdm import tqdm

    from jaxllm.bench import sweep

    base = options["arguments"]
    if base[0] not in SWEPT:
        raise UsageError(f"{base[0]} is not a benchmark that sweep can run; write its name and flags after --")
    axes = _axes(options["vary"])
    settings = sweep.grid(axes)
    if options["bench_params"] is not None:
        settings = [{**one, **own} for one in sweep.read_params(options["bench_params"]) for own in settings]
    cells = sweep.make_cells(base, settings, options["num_runs"])
    if options["dry_run"]:
        for cell in cells:
            print(shlex.join(["jaxllm", "bench", *cell.arguments]))
        return 0
    folder = Path(options["out"]).expanduser()
    with tqdm(total=len(cells), unit="cell", disable=not sys.stderr.isatty()) as bar:

        def advance(outcome: sweep.Outcome) -> None:
            if outcome.failure:
                bar.write(f"jaxllm: {outcome.cell.name} failed: {outcome.failure}", file=sys.stderr)
            bar.update()

        outcomes = sweep.run(cells, folder, advance)
    rows = sweep.rows(outcomes)
    (folder / "summary.csv").write_text(sweep.as_csv(rows), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    print(sweep.table(rows))
    print(f"The results are in {folder}, with summary.csv and summary.json.")
    return 1 if any(outcome.failure for outcome in outcomes) else 0


def _axes(given: list[str]) -> dict[str, list[str]]:
    axes = {}
    for text in given:
        name, equals, values = text.partition("=")
        name = name.lstrip("-").replace("_", "-")
        if not name or not equals or not all(values.split(",")) or name in axes:
            raise UsageError(f"--vary {text}: give each flag once with its values, such as request-rate=1,2,4")
        axes[name] = values.split(",")
    return axes
