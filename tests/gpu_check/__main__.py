"""Runs the parts in order of importance, and writes the results after each.

`python -m tests.gpu_check [--dry] [--minutes 8] [--only NAME ...] [--out benchmarks/gpu]`. All parts share the time; a
named part has all of it, and its results are merged with those of the same day. Exit status: 1 for failures, 2 without
a GPU, 3 for checks that were not run. A missed target is not a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.gpu_check import report
from tests.gpu_check.check import empty
from tests.gpu_check.parts import PARTS
from tests.support.paths import ROOT

LOGGED = 1 << 20  # bytes kept of each log
END = 5  # seconds between terminating and killing a part
Start = Callable[[str, Path, float, bool], int]


def main(arguments: Sequence[str] | None = None, start: Start | None = None) -> int:
    """Run the requested parts; `start` runs one, by default in a separate process."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_check", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="every part on a CPU, with tiny shapes")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together (default: 8)")
    parser.add_argument("--only", nargs="+", choices=[name for name in PARTS if name != "machine"], metavar="NAME")
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: $OUT, else benchmarks/gpu; dry: a new one)"
    )
    options = parser.parse_args(arguments)
    given = options.out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    out = given or (Path(tempfile.mkdtemp(prefix="gpu-check-")) if options.dry else ROOT / "benchmarks" / "gpu")
    chosen = options.only or [name for name, part in PARTS.items() if not part.is_optional or options.dry]
    names = [name for name in PARTS if name == "machine" or name in chosen]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Any] = {}
        for place, name in enumerate(names):
            left = 60 * options.minutes - (time.monotonic() - began) - END
            seconds = left * PARTS[name].seconds / sum(PARTS[other].seconds for other in names[place:])
            parts[name] = _part(start or launch, name, Path(folder), seconds, options.dry)
            if name == "machine" and not parts[name]["measured"]:
                print("there is nothing to check: " + "; ".join(parts[name]["failures"] + parts[name]["skipped"]))
                return 2
            path = report.write(parts, out, options.dry)
            for log in Path(folder).glob("*.log"):
                if log.stat().st_size:
                    (out / "logs").mkdir(exist_ok=True)
                    (out / "logs" / log.name).write_bytes(log.read_bytes()[-LOGGED:])
            print(f"\n{report.summary({name: parts[name]})}", flush=True)
    print(f"\n{report.summary(parts)}\n{time.monotonic() - began:.0f} s in all: {path}")
    verdicts = {report.verdict(part) for part in parts.values()}
    return 1 if "failed" in verdicts else 3 if "incomplete" in verdicts else 0


def launch(name: str, folder: Path, seconds: float, is_dry: bool) -> int:
    """Run a part in a separate process, ended after `seconds`; return its exit status."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu_check.child", name, str(folder), f"{seconds:.0f}"]
    paths = [str(ROOT), str(ROOT / "server"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), **PARTS[name].environment}
    with (folder / f"{name}.log").open("w") as errors:
        process = subprocess.Popen(
            [*command, *["--dry"] * is_dry], cwd=ROOT, env=environment, stderr=errors, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # its remaining processes
            except ProcessLookupError:
                pass
            process.wait()


def _part(start: Start, name: str, folder: Path, seconds: float, is_dry: bool) -> dict[str, Any]:
    """Run a part and return its notes, complete or not."""
    print(f"\n== {name}: up to {seconds:.0f} s", flush=True)
    status = start(name, folder, seconds, is_dry)
    path = folder / f"{name}.json"
    notes: dict[str, Any] = json.loads(path.read_text()) if path.exists() else empty()
    if status == 0 and notes["status"] == "done":
        return notes
    notes["status"] = f"was out of time after {seconds:.0f} s" if status == 124 else f"ended with status {status}"
    log = folder / f"{name}.log"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    if lines and status != 124:
        notes["status"] += f" ({lines[-1]:.200})"
    notes["not_run" if status == 124 else "failures"].append(f"the rest of {name}: it {notes['status']}")
    print(f"[{name}] {notes['status']}", flush=True)
    return notes


if __name__ == "__main__":
    sys.exit(main())
