"""The committed table of clients has a row for each, and a cell for each of their tests."""

from __future__ import annotations

import ast
import json
import re

import pytest

from tests.clients import table
from tests.clients.common import NODE

HERE = NODE.parent
FILES = sorted(path.stem for path in HERE.glob("test_*.py") if path.stem != "test_table")


def cells_of(module: str) -> set[str]:
    """Return the columns that a file's tests make."""
    functions = [node for node in ast.parse((HERE / f"{module}.py").read_text()).body if isinstance(node, ast.FunctionDef)]
    return {table.feature_of(node.name) for node in functions if node.name.startswith("test_")}


def test_every_client_has_a_file_and_every_file_a_client() -> None:
    assert FILES == sorted(table.CLIENTS)
    named = [line for file in ("requirements.txt", "requirements-aiperf.txt") for line in (HERE / file).read_text().splitlines()]
    packages = {re.split(r"[\[>=]", line)[0] for line in named if not line.startswith("#")}
    packages |= {f"npm:{name}" for name in json.loads((NODE / "package.json").read_text())["dependencies"]}
    rows = {package for client in table.CLIENTS.values() for package in client.packages}
    assert packages - table.HELPERS == rows


@pytest.mark.parametrize("module", FILES)
def test_the_committed_table_has_its_row(module: str) -> None:
    text = table.DOCUMENT.read_text()
    cells = cells_of(module)
    row = table.render({(module, cell): [True] for cell in cells}, dict.fromkeys(table.packages(), "1"))
    (expected,) = (line for line in row.splitlines() if line.startswith(f"| {table.CLIENTS[module].name} |"))
    assert expected in text.splitlines(), "run `make clients`"
    assert all(f"{package.removeprefix('npm:')} " in text for package in table.CLIENTS[module].packages)


def test_a_cell_fails_with_any_of_its_tests() -> None:
    outcomes = {("test_openai", "chat"): [True, True], ("test_openai", "stream"): [True, False]}
    (row,) = (line for line in table.render(outcomes, dict.fromkeys(table.packages(), "1")).splitlines() if "| OpenAI, Python |" in line)
    assert row.startswith("| OpenAI, Python | ✓ | **fails** |  |")
