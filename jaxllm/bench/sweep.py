"""Run a grid of benchmarks, one process per cell; skip cells with a result file."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.bench.compare import direction, figures
from jaxllm.errors import UserError

Settings = Mapping[str, Any]
SHOWN = (
    *("request_throughput", "output_throughput", "total_token_throughput", "request_goodput"),
    *("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms"),
    *("requests_per_second", "tokens_per_second", "output_tokens_per_second"),
    *("avg_latency", "percentiles.99"),
)

_ERROR = re.compile(r"error: | failed: ")


class Cell(NamedTuple):
    """One run of a benchmark."""

    settings: Settings
    run: int
    arguments: tuple[str, ...]  # of `jaxllm bench`

    @property
    def name(self) -> str:
        shown = "-".join(f"{name}={value}" for name, value in self.settings.items()) or "all"
        digest = hashlib.sha256(json.dumps(self.arguments).encode()).hexdigest()[:8]
        return f"{re.sub(r'[^A-Za-z0-9_.=-]', '_', shown)[:100]}-run{self.run}-{digest}"


class Outcome(NamedTuple):
    """A cell's result or failure."""

    cell: Cell
    result: Mapping[str, Any] | None
    failure: str = ""


def grid(axes: Mapping[str, Sequence[Any]]) -> list[Settings]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def read_params(path: str) -> list[Settings]:
    """Read JSON or YAML: a list of settings, or an object of lists to combine; raise `UserError` otherwise.

    Names get dashes: `max_tokens` becomes "max-tokens".
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is neither JSON nor YAML: {' '.join(str(error).split())}") from error
    if isinstance(content, dict):
        content = grid({name: value if isinstance(value, list) else [value] for name, value in content.items()})
    if not isinstance(content, list) or not content or not all(isinstance(entry, dict) for entry in content):
        raise UserError(f"{path} must hold a list of objects (settings), or an object of lists (a grid).")
    return [{str(name).lstrip("-").replace("_", "-"): value for name, value in entry.items()} for entry in content]


def make_cells(base: Sequence[str], settings: Sequence[Settings], num_runs: int) -> list[Cell]:
    return [
        Cell(one, run, (*base, *itertools.chain.from_iterable(_flags(name, value) for name, value in one.items())))
        for run in range(num_runs)
        for one in settings
    ]


def run(cells: Iterable[Cell], folder: Path, advance: Callable[[Outcome], object]) -> list[Outcome]:
    """Return the outcome of each cell, from its result file if present.

    Other cells run in a process; one that fails leaves a log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for cell in cells:
        outcomes.append(_run_cell(cell, folder))
        advance(outcomes[-1])
    return outcomes


def _run_cell(cell: Cell, folder: Path) -> Outcome:
    path, partial, log = (folder / f"{cell.name}{suffix}" for suffix in (".json", ".json.part", ".log"))
    if not path.exists():
        partial.unlink(missing_ok=True)
        command = [sys.executable, "-m", "jaxllm", "bench", *cell.arguments, *output_flags(cell.arguments[0], partial)]
        with log.open("w", encoding="utf-8") as stream:
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream).returncode
        if code or not partial.exists():
            said = log.read_text(encoding="utf-8", errors="replace")
            return Outcome(cell, None, f"exit code {code}: {reason_of(said)}")
        os.replace(partial, path)
    try:
        return Outcome(cell, json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        return Outcome(cell, None, f"{path} is not valid JSON: {error}; delete it to run the cell again")


def reason_of(said: str) -> str:
    lines = said.strip().splitlines() or ["no output"]
    # Later lines may be hints or saved files.
    return next((line for line in reversed(lines) if _ERROR.search(line)), lines[-1])


def output_flags(benchmark: str, path: Path) -> list[str]:
    if benchmark == "serve":
        return ["--save-result", "--result-dir", str(path.parent), "--result-filename", path.name]
    return ["--output-json", str(path)]


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [
        {**outcome.cell.settings, "run": outcome.cell.run, **figures(outcome.result or {}), "failure": outcome.failure}
        for outcome in outcomes
    ]


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row if direction(name) is None or name in SHOWN))
    if not any(name in SHOWN for name in names):
        names = list(dict.fromkeys(name for row in rows for name in row))
    names = [name for name in names if name != "failure" or any(row["failure"] for row in rows)]
    lines = [names, *([_cell(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    return "\n".join("  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=True)) for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _flags(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]
