"""The Dockerfile: linted, and its references exist. No registry is reachable here, so no image is built."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxllm_server.shared.options import ServerOptions
from tests.deploy import checks
from tests.support.paths import ROOT

HADOLINT = Path(sys.executable).with_name("hadolint")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()


def problems(text: str) -> Iterator[str]:
    """Yield the problems of a Dockerfile."""
    options = ServerOptions()
    if re.findall(r"^EXPOSE (.*)$", text, re.MULTILINE) != [f"{options.port} {options.grpc_port}"]:
        yield "other ports"
    if re.findall(r"^USER (.*)$", text, re.MULTILINE) != ["10001:10001"] or "useradd --uid 10001 " not in text:
        yield "the user"
    (python,) = re.findall(r"^ARG PYTHON=(3\.\d+)-", text, re.MULTILINE)
    if f"Programming Language :: Python :: {python}" not in PROJECT["classifiers"]:
        yield f"Python {python}"
    for extras in re.findall(r'pip install "\.\[(.*)\]"', text):
        if unknown := set(extras.split(",")) - PROJECT["optional-dependencies"].keys():
            yield f"extras {unknown}"
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for name in sources.split():
            if not (ROOT / name).exists() or f"!{name}" not in IGNORED:
                yield f"{name} is not sent"
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    if unknown := set(re.findall(r"^COPY --from=(\S+)", text, re.MULTILINE)) - set(stages):
        yield f"stages {unknown}"
    (path,) = re.findall(rf"http://127\.0\.0\.1:{options.port}(/\w*)", text) or [""]
    if path not in ("/live", "/health", "/ready"):  # these need no key
        yield f"the health check asks for {path}"
    (command,) = re.findall(r"^CMD (.*)$", text, re.MULTILINE)
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    if [name for name in json.loads(entry) if name not in PROJECT["scripts"]]:
        yield f"no script {entry}"
    if checks.served(tuple(json.loads(command)))[0].host != "0.0.0.0":
        yield "no client can reach the server"
    done = subprocess.run([HADOLINT, "--no-color", "-"], input=text, capture_output=True, text=True)
    yield from done.stdout.splitlines()


def test_nothing_is_wrong() -> None:
    assert list(problems(checks.DOCKERFILE)) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("USER 10001:10001", "USER root"),
        ("--uid 10001", "--uid 1000"),
        ("EXPOSE 8000 50051", "EXPOSE 8000 50052"),
        ("PYTHON=3.12", "PYTHON=3.9"),
        ("server,otel,cuda12", "server,otel,cuda"),
        ("COPY server server", "COPY servers server"),
        ("--from=build-cpu", "--from=build-gpu"),
        ("8000/live", "8000/metrics"),
        ('ENTRYPOINT ["jaxllm"]', 'ENTRYPOINT ["jaxlm"]'),
        ('"--host", "0.0.0.0"', '"--host", "127.0.0.1"'),
        ("WORKDIR /cache", "WORKDIR cache"),
        ("--yes --no-install-recommends", "--yes"),
        ("FROM runtime AS cpu", "FROM runtime AS cuda12"),
    ],
)
def test_a_planted_mistake_is_found(right: str, wrong: str) -> None:
    assert right in checks.DOCKERFILE
    assert next(problems(checks.DOCKERFILE.replace(right, wrong)), None) is not None
