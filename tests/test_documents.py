"""README, ARCHITECTURE and docs/: their code blocks run, their links resolve, and the files that they name exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.ci
DOCUMENTS = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(?P<skip><!-- not run: [^>]+-->\n)?```(?P<kind>sh|python)\n(?P<code>.*?)```", re.DOTALL)
SERVE = re.compile(r"^jaxllm serve *(#.*)?$", re.MULTILINE)
ROOMS = ("jaxllm", "server/jaxllm_server", "tests", "pallas_kernels")  # that names in documents begin in
SECONDS = 1200  # benchmarks compile all programs


def blocks() -> list[tuple[str, str, str]]:
    return [
        (document, found["kind"], found["code"])
        for document in DOCUMENTS
        for found in BLOCK.finditer((ROOT / document).read_text())
        if not found["skip"] and "pip install" not in found["code"].split("#")[0] and "from openai" not in found["code"]
    ]


@pytest.mark.parametrize(
    "document", [pytest.param(name, marks=pytest.mark.slow) if "measuring" in name else name for name in DOCUMENTS]
)
def test_every_block_runs(document: str, tmp_path: Path) -> None:
    """In order, in an empty folder. A block that is `jaxllm serve` alone is a server for those behind it."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": f"{ROOT}:{ROOT / 'server'}"}
    server: subprocess.Popen[bytes] | None = None
    try:
        for _, kind, code in (block for block in blocks() if block[0] == document):
            if SERVE.search(code) and "&" not in code:
                server = subprocess.Popen(["jaxllm", "serve"], cwd=tmp_path, env=environment)
                wait_until_ready(server)
                continue
            needs_server = re.search(r"localhost:(8000|50051)|jaxllm bench serve", code) and "jaxllm serve" not in code
            if needs_server and server is None:
                server = subprocess.Popen(["jaxllm", "serve"], cwd=tmp_path, env=environment)
                wait_until_ready(server)
            elif "jaxllm serve" in code and server is not None:
                stop(server)
                server = None
            command = [sys.executable, "-c", code] if kind == "python" else ["bash", "-euc", code]
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env=environment,
                timeout=SECONDS,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            assert done.returncode == 0, f"{code}\n{done.stdout.decode()}"
    finally:
        if server is not None:
            stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    assert server.wait(60) == 0


def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert server.poll() is None
        with suppress(httpx.HTTPError):
            if httpx.get("http://localhost:8000/ready", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError("the server did not become ready")


@pytest.mark.parametrize("document", [*DOCUMENTS, "ARCHITECTURE.md", "CONTRIBUTING.md", "pallas_kernels/README.md"])
def test_links_and_paths_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    folder = (ROOT / document).parent
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    missing = [link for link in links if not (folder / link).exists()]
    roots = (ROOT, *(ROOT / name for name in ROOMS), folder)
    for name in re.findall(r"`((?:[\w.-]+/)+(?:[\w.-]+\.(?:py|md|proto|toml|txtpb|json))?)`", text):
        if not any((root / name).exists() for root in roots):
            missing.append(name)
    for name in re.findall(r"`((?:[a-z_]+/)?test_[a-z_]+)`", text):
        if not list((ROOT / "tests").glob(f"**/{name}.py")):
            missing.append(name)
    assert not missing
