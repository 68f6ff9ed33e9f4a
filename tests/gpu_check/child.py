"""One part in a process of its own: `python -m tests.gpu_check.child NAME FOLDER SECONDS [--dry]`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.gpu_check.check import Check
from tests.gpu_check.parts import PARTS, missing


def run(name: str, folder: Path, seconds: float, is_dry: bool) -> int:
    """Run a part; nothing that happens in it is raised."""
    check = Check(name, folder, seconds, is_dry)
    absent = missing(PARTS[name].needs)
    if absent:
        check.skip(f"all of it: {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed")
    else:
        with check.guarded("what comes behind this in the part", is_wrong=PARTS[name].is_correctness):
            importlib.import_module(f"tests.gpu_check.{name}").run(check)
    check.done()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(arguments)
    # Torch shares the GPU with JAX in some parts: JAX must not take it all at once, but may take all of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.dry:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return run(options.name, options.folder, options.seconds, options.dry)


if __name__ == "__main__":
    sys.exit(main())
