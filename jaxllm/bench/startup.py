"""Measure cold and warm start times in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from jaxllm.errors import EngineError
from pallas_kernels.own_folders import OwnFolder

Kind = Literal["cold", "warm"]
WIDTH = 50
# Exits without waiting for background compilation.
_CHILD = """
import json, os, sys, time
begun = float(sys.argv[1])
settings = json.loads(sys.argv[2])
waits_for_all = settings.pop("waits_for_all")
import jaxllm.llm
from jaxllm import LLM, SamplingParams
imported = time.time()
llm = LLM(**settings)
ready = time.time()
llm.engine.add_request("0", [1], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
while not llm.engine.step():
    pass
first = time.time()
complete = None
if waits_for_all:
    programs = llm.engine.runner.programs
    for key in reversed(programs.rest):  # the one that is wanted last is the next
        programs.want(key)
    programs.wait()
    complete = time.time() - begun if len(programs) == programs.num_all else None
sys.stdout.write(json.dumps({
    "import_s": imported - begun,
    "ready_s": ready - begun,
    "first_token_s": first - begun,
    "all_programs_s": complete,
    "num_programs": len(llm.engine.runner.programs),
    "phases": [phase._asdict() for phase in llm.engine.start_phases],
}))
sys.stdout.flush()
os._exit(0)
"""


@dataclass(frozen=True)
class Start:
    """One start; seconds since the process was launched."""

    kind: Kind
    import_s: float
    ready_s: float
    first_token_s: float
    all_programs_s: float | None  # if awaited
    num_programs: int
    phases: list[dict[str, Any]]


def measure(
    settings: Mapping[str, Any],
    num_iters: int,
    waits_for_all: bool = False,
    cache: str | None = None,
    note: Callable[[Start], object] = lambda start: None,
) -> list[Start]:
    """Start `num_iters` times cold and warm, each in a new process.

    `waits_for_all`: measure until the last program is compiled. With `cache`, a folder of compiled programs, measure
    only warm starts. Raises `EngineError` if a process fails.
    """
    starts = []
    with OwnFolder() as temporary:
        both: tuple[Kind, ...] = ("warm",) if cache else ("cold", "warm")
        kinds: list[Kind] = [kind for kind in both for _ in range(num_iters)]
        folder = cache or temporary
        for number, kind in enumerate(kinds):
            if kind == "cold":
                folder = str(Path(temporary, str(number)))
            start = Start(kind, **_run({**settings, "compilation_cache_dir": folder, "waits_for_all": waits_for_all}))
            starts.append(start)
            note(start)
    return starts


def _run(settings: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-c", _CHILD, str(time.time()), json.dumps(settings)]
    path = os.pathsep.join(filter(None, [*sys.path[:1], os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise EngineError(f"a start failed: {lines[-1]}")
    return json.loads(done.stdout)


def summary(starts: list[Start]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(start.kind for start in starts):
        own = [start for start in starts if start.kind == kind]
        for name in ("import_s", "ready_s", "first_token_s", "all_programs_s"):
            values = [getattr(start, name) for start in own]
            if None not in values:
                found[f"{kind}_{name}"] = median(values)
    return found | {"starts": [vars(start) for start in starts]}


def report(starts: list[Start]) -> str:
    figures = summary(starts)
    names = {
        "import_s": "Imported (s):",
        "ready_s": "Ready (s):",
        "first_token_s": "First token (s):",
        "all_programs_s": "All programs (s):",
    }
    lines = [" Startup Benchmark Result ".center(WIDTH, "=")]
    for kind in dict.fromkeys(start.kind for start in starts):
        of_kind = [start for start in starts if start.kind == kind]
        lines.append(f"{kind.capitalize()} start, median of {len(of_kind)}".center(WIDTH, "-"))
        for name, label in names.items():
            if f"{kind}_{name}" in figures:
                lines.append(f"{label:<40} {figures[f'{kind}_{name}']:<10.2f}")
        lines.append("Phases of the last one, in parentheses those on other threads:")
        for phase in of_kind[-1].phases:
            seconds = f"({phase['seconds']:.2f})" if phase["is_beside"] else f"{phase['seconds']:.2f} "
            lines.append(f"  {phase['name']:<12} {seconds:>8} {phase['cause']}".rstrip())
    return "\n".join([*lines, "=" * WIDTH])
