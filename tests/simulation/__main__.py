"""`python -m tests.simulation`: play the traces of many seeds and print one line of results.

The trace of a failing seed is shortened and written to a file, and the command that plays it is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from tests.simulation.tally import Tally, play, prepare

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status, 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000, help="steps to play at least (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, help="play so many seeds, whatever steps that makes")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--replay", type=Path, help="play this trace instead")
    parser.add_argument("--out", type=Path, default=Path("."), help="the folder for traces that failed")
    args = parser.parse_args(arguments)
    if args.replay is not None:
        return _replay(args.replay)
    total = Tally()
    is_counted = args.seeds is not None
    with tqdm(total=args.seeds if is_counted else args.steps, unit="seed" if is_counted else "step") as bar:
        with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn"), initializer=prepare) as pool:
            seed = args.seed
            while (total.seeds < args.seeds if is_counted else total.steps < args.steps) and len(total.failed) < 10:
                size = 16 * args.processes
                if is_counted:
                    size = min(size, args.seeds - total.seeds)
                for tally in pool.map(play, range(seed, seed + size)):
                    total.add(tally)
                    bar.update(1 if is_counted else tally.steps)
                seed += size
    for failed in total.failed[:3]:
        explain(failed, args.out)
    print(total)
    return int(bool(total.failed))


def _replay(path: Path) -> int:
    from tests.simulation.shrink import failure
    from tests.simulation.trace import Trace

    trace = Trace.load(path)
    error = failure(trace)
    if error is not None:
        traceback.print_exception(error, limit=-8)
    print(f"{path}: seed {trace.seed}, {len(trace.events)} events: {'it fails' if error else 'nothing is wrong'}")
    return int(error is not None)


def explain(seed: int, folder: Path) -> None:
    """Shorten the trace of a failing seed, save it, and print the command that plays it."""
    from tests.simulation.shrink import shrink
    from tests.simulation.trace import make_trace

    path = folder / f"simulation-{seed}.json"
    trace = shrink(make_trace(seed))
    trace.save(path)
    print(
        f"seed {seed} fails, after {len(trace.events)} events: python -m tests.simulation --replay {path}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
