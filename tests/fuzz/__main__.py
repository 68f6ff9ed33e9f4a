"""`make fuzz`: drives every target with atheris, which keeps and mutates inputs that reach new code.

Each target runs in a separate process, for MINUTES. Its corpus is kept in `.cache/fuzz`, where the next run continues.
An input that breaks a target is written there, with the command that replays it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.support.paths import ROOT

CORPUS = ROOT / ".cache" / "fuzz"
INPUT_SECONDS = 10  # bound for one input
MEMORY_MB = 4096  # of the process: a file that claims gigabytes must not get them
MOST_BYTES = 65536


def main() -> int:
    """Run all targets, or the named ones; return 1 if one broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="all, where none is named")
    parser.add_argument("--minutes", type=float, default=1.0, help="for each target")
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "FILE"), help="run one input")
    parser.add_argument("--one", nargs=2, metavar=("TARGET", "SECONDS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replay:
        return replay(*arguments.replay)
    if arguments.one:
        return fuzz(arguments.one[0], int(arguments.one[1]))
    return run_all(arguments.targets, arguments.minutes)


def run_all(names: list[str], minutes: float) -> int:
    """Fuzz targets in sequence."""
    from tests.fuzz.targets import TARGETS

    unknown = set(names) - set(TARGETS)
    if unknown:
        raise SystemExit(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    started, inputs, broken = time.monotonic(), 0, []
    for name in names or TARGETS:
        count, crash = run_one(name, max(1, round(60 * minutes)))
        inputs += count
        print(f"{name:<18}{count:>10,} inputs" + (f"  broken by {crash}" if crash else ""), flush=True)
        if crash:
            broken.append(name)
            print(f"  replay: python -m tests.fuzz --replay {name} {crash}", flush=True)
    took = (time.monotonic() - started) / 60
    print(f"fuzz: {len(names or TARGETS)} targets, {inputs:,} inputs in {took:.1f} minutes, {len(broken)} broken")
    return 1 if broken else 0


def run_one(name: str, seconds: int) -> tuple[int, Path | None]:
    """Fuzz one target in a process; return the number of inputs, and the input that broke it."""
    command = [sys.executable, "-m", "tests.fuzz", "--one", name, str(seconds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
    counted = re.search(r"stat::number_of_executed_units:\s+(\d+)", done.stderr)
    if done.returncode == 0 and counted:
        return int(counted[1]), None
    written = re.search(r"Test unit written to (\S+)", done.stderr)
    print(done.stderr[-4000:], file=sys.stderr)
    return int(counted[1]) if counted else 0, Path(written[1]) if written else Path("nothing that it wrote")


def fuzz(name: str, seconds: int) -> int:
    """Run a target in atheris, which ends the process."""
    import atheris

    with atheris.instrument_imports(include=["jaxllm", "jaxllm_server"], enable_loader_override=False):
        from tests.fuzz.targets import TARGETS
    from tests.fuzz.mutations import mutate

    target = TARGETS[name]
    seeds = target.seeds()
    folder, crashes = CORPUS / name, CORPUS / "broken"
    for made in (folder, crashes):
        made.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (folder / f"seed-{number}").write_bytes(seed)

    def change(data: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        return (mutate(data, chance) if chance.random() < 0.5 else atheris.Mutate(data, most))[:most]

    flags = [
        f"-max_total_time={seconds}",
        f"-timeout={INPUT_SECONDS}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-max_len={MOST_BYTES}",
        f"-artifact_prefix={crashes}/{name}-",
        "-print_final_stats=1",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *flags, str(folder)], target.check, custom_mutator=change)
    atheris.Fuzz()
    return 0


def replay(name: str, file: str) -> int:
    """Run one input as the fuzzer did."""
    from tests.fuzz.targets import TARGETS

    started = time.process_time()
    taken = TARGETS[name].check(Path(file).read_bytes())
    print(f"{'taken' if taken else 'refused'} in {time.process_time() - started:.2f} s")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    raise SystemExit(main())
