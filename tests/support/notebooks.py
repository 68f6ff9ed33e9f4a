"""Runs the notebooks from a clean state; as a program it also writes their outputs into the files."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def execute(path: Path, prelude: str = "") -> tuple[nbformat.NotebookNode, float]:
    """Run a notebook without its outputs in a fresh kernel; return it with new ones, and its CPU seconds.

    The kernel sees the clone's packages and only the CPU device, without this process's JAX settings. The code of
    `prelude` runs first, in a separate cell.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    if prelude:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(prelude))
    before = _children_seconds()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "server")])
    with tempfile.TemporaryDirectory() as folder, _environment({"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}):
        NotebookClient(
            notebook, timeout=300, resources={"metadata": {"path": folder}}, record_timing=False, coalesce_streams=True
        ).execute()
    notebook.metadata["language_info"] = {"name": "python"}  # not this machine's version
    return notebook, _children_seconds() - before


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Change the environment that a kernel inherits; the notebook sets XLA_FLAGS."""
    before = dict(os.environ)
    os.environ.update(settings)
    os.environ.pop("XLA_FLAGS", None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main() -> None:
    """Execute all notebooks, or those named, in place."""
    for path in [Path(name) for name in sys.argv[1:]] or NOTEBOOKS:
        notebook, seconds = execute(path)
        nbformat.write(notebook, path)
        print(f"{path.name}: {seconds:.1f} s of CPU, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
