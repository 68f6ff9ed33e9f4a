"""The servers that all clients share, and the table that their tests make.

`make clients` installs the packages of requirements.txt and node/package.json; without them only the checks of the
committed table are collected.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients import table
from tests.clients.common import EMBEDDER, KNOWN_NAME, MODEL, NODE, PICTURED, TEXTS, Site, post
from tests.support import tool_loop
from tests.support.paths import ROOT
from tests.support.serving_process import ServingProcess
from tests.support.sizes import SLOTS, flags
from training.scenes import Item, render

# Otherwise it requests prices from another host on import.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

if find_spec("litellm") is None or not (NODE / "node_modules").is_dir():
    collect_ignore_glob = [f"{name}.py" for name in table.MODULES]

HERE = Path(__file__).parent
_outcomes: dict[tuple[str, str], list[bool]] = {}
_left_out: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of clients `slow`, because they need a separate environment."""
    for item in items:
        if item.path.parent == HERE and item.path.stem in table.CLIENTS:
            item.add_marker(pytest.mark.slow)


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Record that the run is partial."""
    _left_out.extend(item.name for item in items if item.path.stem in table.CLIENTS)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the outcome of each test of a client."""
    file, _, name = report.nodeid.partition("::")
    if Path(file).stem not in table.CLIENTS or (report.when != "call" and report.passed):
        return
    cell = Path(file).stem, table.feature_of(name.partition("[")[0])
    _outcomes.setdefault(cell, []).append(report.passed)


def pytest_sessionfinish() -> None:
    """Write the table if all tests of all clients ran."""
    if {module for module, _ in _outcomes} == table.CLIENTS.keys() and not _left_out:
        table.DOCUMENT.write_text(table.render(_outcomes, table.versions(), table.DOCUMENT.read_text()))


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """A server with the embedded model, which answers predictably, and its adapter that calls tools."""
    with ServingProcess(*flags(SLOTS), *tool_loop.SERVER_FLAGS, "--enable-tokenizer-info-endpoint") as server:
        yield Site(server.http, server.grpc, MODEL)


@pytest.fixture(scope="session")
def tools_site(site: Site) -> Site:
    """The same server, with the adapter that calls tools as the model."""
    return site._replace(model=tool_loop.MODEL)


@pytest.fixture(scope="session")
def long_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with a context for agents' prompts and random weights, so that it can generate any text."""
    folder = long_model(tmp_path_factory.mktemp("model"))
    names = ("--load-format", "dummy", "--tool-call-parser", "hermes")
    names += ("--served-model-name", "small", "--served-model-name", KNOWN_NAME)
    with ServingProcess(str(folder), *names, *flags(SLOTS)) as server:
        yield Site(server.http, server.grpc, "small")


def long_model(folder: Path) -> Path:
    """Write the embedded model's shape and tokenizer with a context of 16,384 tokens."""
    source = ROOT / "jaxllm" / "embedded" / "model"
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        settings = json.loads((source / name).read_text())
        (folder / name).write_text(json.dumps({**settings, key: 16384}))
    return folder


@pytest.fixture(scope="session")
def closing(long_site: Site) -> dict[str, int]:
    """The logit_bias that makes a random model end texts and objects soon."""
    ids: set[int] = set()
    for text in ('"', "}"):
        ids |= set(post(f"{long_site.http}/tokenize", prompt=text)["tokens"])
    return {str(token): 100 for token in ids}


@pytest.fixture(scope="session")
def pictured() -> Iterator[Site]:
    """A server with the shipped model that answers questions about pictures."""
    with ServingProcess(PICTURED, *flags(SLOTS)) as server:
        yield Site(server.http, server.grpc, PICTURED)


@pytest.fixture(scope="session")
def picture() -> bytes:
    """The PNG of a picture to which `COLOUR` is a question."""
    buffer = io.BytesIO()
    items = (Item("red", "square", 0.5, 0.83, 0.11), Item("blue", "circle", 0.8, 0.5, 0.12))
    render(items, np.random.default_rng(0)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="session")
def embedder() -> Iterator[Site]:
    """A server with the shipped embedder."""
    with ServingProcess(EMBEDDER) as server:
        yield Site(server.http, server.grpc, EMBEDDER)


@pytest.fixture(scope="session")
def embeddings(embedder: Site) -> Any:
    """The embeddings of `TEXTS`, requested without a client library."""
    return np.array([item["embedding"] for item in post(f"{embedder.api}/embeddings", input=TEXTS)["data"]])
