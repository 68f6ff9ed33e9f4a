"""Notebooks run from a clean clone, in time, reproduce their printed outputs, and fail if jaxllm is broken."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from tests.support.notebooks import NOTEBOOKS, execute

# 30 seconds of two cores; wall-clock time would depend on other processes.
CPU_SECONDS = 60
BROKEN = {  # a fault in jaxllm, and the text of the check that it fails
    "02_scheduler": (
        "from jaxllm.scheduler.block_pool import PoolEditor\nPoolEditor.look_up = lambda self, digests: []",
        "== 12",
    ),
    "03_kernel": (
        "import pallas_kernels\nright = pallas_kernels.paged_decode\n"
        "pallas_kernels.paged_decode = lambda *args, **kwargs: right(*args, **kwargs) * 1.001",
        "assert error < 1e-5",
    ),
    "04_tensor_parallelism": (
        "import os\nos.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'\n"
        "from jaxllm.model.sharding import Layout\nLayout.total = lambda self, x, name: x",
        "assert tokens == stories",
    ),
}


def _read(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def _printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def test_there_are_seven() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06", "07"]
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 600_000


@pytest.mark.ci
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_says_what_is_printed_in_it(path: Path) -> None:
    notebook, seconds = execute(path)  # raises if a cell does, failed asserts included
    assert seconds < CPU_SECONDS
    fresh = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [_printed(cell) for cell in fresh] == [_printed(cell) for cell in _read(path)], "run `make notebooks`"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_as_it_ran(path: Path) -> None:
    cells = _read(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    checks = [node for cell in cells for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Assert)]
    assert len(checks) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_notebook_fails_where_jaxllm_is_wrong(name: str) -> None:
    prelude, check = BROKEN[name]
    path = next(path for path in NOTEBOOKS if path.stem == name)
    with pytest.raises(CellExecutionError, match="AssertionError") as failure:
        execute(path, prelude)
    assert check in str(failure.value)
