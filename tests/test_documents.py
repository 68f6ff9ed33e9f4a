"""Documents: code blocks of README and docs/ run, links resolve, and the named files and commands exist.

docs/history keeps texts unchanged, and names deleted files.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from benchmarks import scaling, step_bytes
from tests.support.paths import ROOT

pytestmark = pytest.mark.ci
WITH_CODE = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
ALL = (
    *(*WITH_CODE, "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "DECISIONS.md"),
    *("pallas_kernels/README.md", "jaxllm/embedded/model/README.md", "deploy/kubernetes/README.md"),
)
# A comment before a block gives the reason why it cannot run here.
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?```(?P<kind>sh|python|yaml)\n(?P<code>.*?)```", re.DOTALL
)
NEEDS_SERVER = re.compile(r"localhost:(8000|50051)|jaxllm bench serve")
STARTS_SERVER = re.compile(r"^jaxllm serve\b[^\n]*", re.MULTILINE)
ROOMS = (ROOT, *(ROOT / name for name in ("jaxllm", "server/jaxllm_server", "tests", "pallas_kernels")))
SECONDS = 1200  # benchmarks compile all programs


class Block(NamedTuple):
    """A piece of code in a document."""

    reason: str | None  # why it does not run
    kind: str
    code: str


def blocks(document: str) -> list[Block]:
    return [Block(*found.group("reason", "kind", "code")) for found in BLOCK.finditer((ROOT / document).read_text())]


@pytest.mark.slow
def test_readme_in_the_environment_that_it_makes(tmp_path: Path) -> None:
    """Every block runs with the packages that the commands of README have installed before it, and no others."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    shutil.copytree(ROOT, tmp_path / "clone", ignore=shutil.ignore_patterns(".*", "*.egg-info", "node_modules"))
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own["PATH"] = f"{tmp_path / 'venv' / 'bin'}:{own['PATH']}"

    def command(block: Block) -> list[str]:
        installs = re.findall(r"^.*# (pip install .*)$", block.code, re.MULTILINE) if block.kind == "python" else []
        for line in installs:
            subprocess.run(["bash", "-euc", line], cwd=tmp_path / "clone", env=own, check=True)
        return ["python", "-c", block.code] if block.kind == "python" else ["bash", "-euc", block.code]

    server = None
    try:
        for block in (block for block in blocks("README.md") if block.reason is None):
            if STARTS_SERVER.match(block.code.strip()):
                server = subprocess.Popen(["jaxllm", "serve"], cwd=tmp_path / "clone", env=own)
                await_ready(server)
                continue
            done = subprocess.run(command(block), cwd=tmp_path / "clone", env=own, timeout=SECONDS, check=False)
            assert done.returncode == 0, block.code
    finally:
        if server is not None:
            server.terminate()
            assert server.wait(60) == 0


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": f"{ROOT}:{ROOT / 'server'}"}


@contextmanager
def served(folder: Path) -> Iterator[None]:
    """Serve the embedded model at the ports that the documents name; SIGTERM must end it with code 0."""
    server = subprocess.Popen(["jaxllm", "serve"], cwd=folder, env=environment())
    try:
        await_ready(server)
        yield
    finally:
        server.terminate()
        assert server.wait(60) == 0


def await_ready(server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert server.poll() is None
        with suppress(httpx.HTTPError):
            if httpx.get("http://localhost:8000/ready", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError("the server did not become ready")


def run(block: Block, folder: Path) -> None:
    code = re.sub(r"^pip install .*$", "", block.code, flags=re.MULTILINE)  # already installed
    if STARTS_SERVER.fullmatch(code.strip()):
        return  # `served` runs it
    command = [sys.executable, "-c", code] if block.kind == "python" else ["bash", "-euc", code]
    done = subprocess.run(
        command, cwd=folder, env=environment(), timeout=SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, f"{block.code}\n{done.stdout.decode()}"


@pytest.mark.parametrize(
    "document", [pytest.param(name, marks=pytest.mark.slow) if "measuring" in name else name for name in WITH_CODE]
)
def test_every_block_runs(document: str, tmp_path: Path) -> None:
    """Run the blocks in order, in an empty folder; those that need a server last."""
    runnable = [block for block in blocks(document) if block.reason is None]
    with_server = [block for block in runnable if NEEDS_SERVER.search(block.code) and "jaxllm serve" not in block.code]
    for block in runnable:
        if block not in with_server:
            run(block, tmp_path)
    if with_server:
        with served(tmp_path):
            for block in with_server:
                run(block, tmp_path)


@pytest.mark.parametrize(
    ("document", "reason"),
    [(document, block.reason) for document in WITH_CODE for block in blocks(document) if block.reason is not None],
)
def test_blocks_that_are_not_run(document: str, reason: str) -> None:
    pytest.skip(f"a block of {document} {reason}")


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", ALL)
def test_what_a_document_names_exists(document: str) -> None:
    """Links and their anchors, paths in backquotes, modules of `python -m`, and targets of `make`."""
    text, folder = (ROOT / document).read_text(), (ROOT / document).parent
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    missing = [link for link in links if not (folder / link).exists()]
    missing += [
        f"{link}#{anchor}"
        for link, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", text)
        if anchor not in anchors(folder / link if link else ROOT / document)
    ]
    roots = (*ROOMS, folder)
    for name in re.findall(r"`([\w.*-]+(?:/[\w.*-]*)+)`", text):
        known = [root for root in roots if (root / name.partition("/")[0]).is_dir()]
        if known and not any([*root.glob(name.rstrip("/")), *root.glob(f"{name}.py")] for root in known):
            missing.append(name)
    for name in re.findall(r"`([\w-]+\.(?:py|md|proto))`", text):
        if not any(ROOT.glob(f"[!.]*/**/{name}")) and not (ROOT / name).exists():
            missing.append(name)
    for name in re.findall(r"python -m ((?:tests|training|jaxllm|pallas_kernels)[\w.]*)", text):
        path = ROOT / name.replace(".", "/")
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists():
            missing.append(f"python -m {name}")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing += [f"make {name}" for name in re.findall(r"`make ([a-z][\w-]*)", text) if name not in targets]
    assert not missing


def test_tables_are_what_is_computed():
    assert "\n".join(step_bytes.lines()) in (ROOT / "docs" / "benchmarks.md").read_text()
    for table in (scaling.fits(), scaling.layouts()):
        assert "\n".join(table) in (ROOT / "docs" / "scaling.md").read_text()
