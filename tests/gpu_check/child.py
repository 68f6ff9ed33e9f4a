"""Runs one part in a separate process: `python -m tests.gpu_check.child NAME FOLDER SECONDS [--dry]`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from tests.gpu_check.check import Check
from tests.gpu_check.parts import ENGINE, PARTS, missing


def run(name: str, folder: Path, seconds: float, is_dry: bool) -> int:
    """Run a part without raising any exception."""
    check, part = Check(name, folder, seconds, is_dry), PARTS[name]
    absent = missing(part.needs)
    if absent:
        check.not_run(f"all of it: {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed")
    else:
        with check.guarded("what comes after this in the part", is_wrong=True), _limits(part.needs, is_dry):
            importlib.import_module(f"tests.gpu_check.{name}").run(check)
    check.done()
    return 0


def _limits(needs: tuple[str, ...], is_dry: bool) -> AbstractContextManager[None]:
    """Make engines of a dry run list a GPU's programs."""
    if not is_dry or needs != ENGINE:
        return nullcontext()
    return importlib.import_module("tests.gpu_check.as_gpu").limits()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(PARTS[options.name].memory)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # A new cache for each run, because starts with an empty cache are measured.
    os.environ["JAXLLM_CACHE_DIR"] = str(options.folder / "programs")
    if options.dry:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return run(options.name, options.folder, options.seconds, options.dry)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all notes are on disk; XLA's threads may still run
