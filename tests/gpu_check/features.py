"""Compare every feature of the engine, token by token, with a CPU's results in expected.json.

`python -m tests.gpu_check.features --write` writes that file, on a CPU. Groups run in parallel processes, each with a
bound on device memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.gpu_check.check import Check
from tests.gpu_check.feature import CASES, GROUPS, LINE
from tests.support.paths import ROOT

EXPECTED = Path(__file__).with_name("expected.json")
AT_ONCE = 9  # processes, each with the part's share of the device's memory


def run(check: Check) -> None:
    expected, names = json.loads(EXPECTED.read_text()), list(GROUPS)
    at_once = 2 if check.is_dry else min(AT_ONCE, os.cpu_count() or 2)
    how, compared = "dry" if check.is_dry else "gpu", 0
    left = {case for name in names for case in GROUPS[name].cases}
    with ThreadPoolExecutor(at_once) as threads:
        ends = time.monotonic() + check.left - 3
        futures = {threads.submit(group_of, name, how, check.folder, ends): name for name in names}
        for future in as_completed(futures):
            results, trouble = future.result()
            compared += sum("value" in result for result in results)
            for result in results:
                left.discard(result["case"])
                _note(check, result, expected)
            for case in GROUPS[futures[future]].cases:
                if case in left and trouble is not None:
                    left.discard(case)
                    (check.not_run if trouble == "" else check.fail)(f"{case}: {trouble or 'no time was left'}")
    check.measure(cases_compared=compared, of=len(CASES))


def differences(case: str, found: Any, expected: Any) -> Iterator[str]:
    """List the differences from the CPU's result; two tokens of equal likelihood end the comparison of an output."""
    limit = CASES[case].tolerance
    if len(found) != len(expected):
        yield f"{len(found)} outputs, not {len(expected)}"
        return
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if isinstance(one, list):
            if len(one) != len(other) or not all(abs(a - b) <= limit for a, b in zip(one, other, strict=True)):
                yield f"output {number}: {one[:4]}, not {other[:4]}"
            continue
        ids = one["ids"], other["ids"]
        same = next((k for k, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), min(map(len, ids)))
        is_tie = same < len(ids[1]) and "gap" in other and other["gap"][same] <= 2 * limit
        if (same < max(map(len, ids))) and not is_tie:
            parts = [own[same : same + 3] for own in ids]
            yield f"output {number} differs from token {same} on: {parts[0]}, not {parts[1]}"
        if ("lp" in one) != ("lp" in other):
            yield f"output {number}: only one of the two has log-probabilities"
        elif "lp" in one:
            off = [abs(a - b) for a, b in zip(one["lp"][:same], other["lp"][:same], strict=True)]
            if not all(each <= limit for each in off):  # NaN is not
                yield f"output {number}: a log-probability is {max(off):.4f} off, more than {limit}"


def _note(check: Check, result: dict[str, Any], expected: dict[str, Any]) -> None:
    case = result["case"]
    found = [result["error"]] if "error" in result else list(differences(case, result["value"], expected[case]))
    check.measure(feature=case, verdict="differs" if found else "equal", seconds=result["seconds"])
    if found:
        check.fail(f"{case}: {'; '.join(found[:3])}")


def group_of(name: str, how: str, folder: Path, ends: float) -> tuple[list[dict[str, Any]], str | None]:
    """Run a group in a process; return its results, and the reason of missing ones: "" if no time was left."""
    left = ends - time.monotonic()
    if left < 1:
        return [], ""
    environment = dict(os.environ)
    if how != "gpu":
        environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    log = folder / f"feature_{name}.log"
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu_check.feature", name, how]
    with log.open("w") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            text, _ = process.communicate(timeout=left)
            trouble = None
            if process.returncode:
                last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:] or [""]
                trouble = f"its process ended with {process.returncode}: {last[0]:.300}"
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
            trouble = ""
    lines = [line for line in text.splitlines() if line.startswith(LINE)]
    return [json.loads(line.removeprefix(LINE)) for line in lines], trouble


def main(arguments: Sequence[str] | None = None) -> int:
    """Write expected.json on this machine's CPU, or compare all cases with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS), metavar="GROUP")
    options = parser.parse_args(arguments)
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    failed = []
    for name in options.only:
        before = len(failed)
        with tempfile.TemporaryDirectory() as folder:
            results, trouble = group_of(name, "cpu", Path(folder), time.monotonic() + 600)
        if trouble is not None:
            failed.append(f"{name}: {trouble}")
        for result in results:
            case = result["case"]
            if "error" in result:
                failed.append(f"{case}: {result['error']}")
            elif options.write:
                expected[case] = result["value"]
            else:
                failed += [f"{case}: {line}" for line in differences(case, result["value"], expected[case])]
            print(f"{case}: {result['seconds']} s", flush=True)
        if options.write:
            rows = [f"{json.dumps(one)}: {json.dumps(expected[one])}" for one in CASES if one in expected]
            EXPECTED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
        print("\n".join(failed[before:]) or f"{name}: as expected", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
