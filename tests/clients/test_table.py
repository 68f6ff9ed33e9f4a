"""The committed table of clients has a row per client, and a cell per feature that its tests cover."""

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
    """Return the columns of a file's tests."""
    tree = ast.parse((HERE / f"{module}.py").read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {table.feature_of(name) for name in names if name.startswith("test_")}


def row_of(module: str, outcomes: dict[tuple[str, str], list[bool]]) -> str:
    """Return a file's row in a table of these outcomes."""
    lines = table.render(outcomes, dict.fromkeys(table.packages(), "1"), "").splitlines()
    (row,) = (line for line in lines if line.startswith(f"| {table.CLIENTS[module].name} |"))
    return row


def test_every_client_has_a_file_and_every_file_a_client() -> None:
    assert FILES == sorted(table.CLIENTS)
    text = "".join((HERE / file).read_text() for file in ("requirements.txt", "requirements-aiperf.txt"))
    packages = set(re.findall(r"^[\w-]+", text, re.MULTILINE))
    packages |= {f"npm:{name}" for name in json.loads((NODE / "package.json").read_text())["dependencies"]}
    rows = {package for client in table.CLIENTS.values() for package in client.packages}
    assert packages - table.HELPERS == rows


@pytest.mark.parametrize("module", FILES)
def test_the_committed_table_has_its_row(module: str) -> None:
    text = table.DOCUMENT.read_text()
    expected = row_of(module, {(module, cell): [True] for cell in cells_of(module)})
    # Passing is checked by `make clients`, which needs the clients.
    assert expected in text.replace("**fails**", "✓").splitlines(), "run `make clients`"
    assert all(f"{package.removeprefix('npm:')} " in text for package in table.CLIENTS[module].packages)


def test_what_is_written_by_hand_stays() -> None:
    before = table.DOCUMENT.read_text()
    made = table.render({}, dict.fromkeys(table.packages(), "1"), before)
    sections = [text.partition(table.BY_HAND) for text in (before, made)]
    assert sections[0][1:] == sections[1][1:] and "| file |" in sections[0][2]


def test_a_cell_fails_with_any_of_its_tests() -> None:
    outcomes = {("test_openai", "chat"): [True, True], ("test_openai", "stream"): [True, False]}
    assert row_of("test_openai", outcomes).startswith("| OpenAI, Python | ✓ | **fails** |  |")
