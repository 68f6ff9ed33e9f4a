"""Under `python -O`, which removes asserts, jaxllm must keep all of its guarantees.

A server and an engine run without assertions. The tests keep theirs, because they run in another process or because
pytest converts the asserts of test modules. `make test-optimized` runs all of CI's tests this way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.test_verdicts import ACCEPTED, BAD, BASE, EDGES, GOOD, TOGETHER, Clients, Refused, is_json
from tests.support.serving_process import QUICK, ROOT, ServingProcess

OPTIMIZED = {**os.environ, "PYTHONOPTIMIZE": "1", "FUZZ_FEW": "20"}
# Errors for hostile callers and folders, over every protocol; and failures of one request that affect no other.
SELECTED = (
    "tests/fuzz/test_targets.py",
    "tests/fuzz/test_table.py",
    "tests/checkpoints/test_files.py",
    "tests/engine/test_async_llm.py::test_a_request_that_fails_fails_alone",
    "tests/engine/test_async_llm.py::test_a_request_that_cannot_be_taken_in_fails_alone",
    "tests/engine/test_async_llm.py::test_one_of_several_samples_that_fails_fails_the_request",
)
LEFT_OUT = "not own_code and not its_box"  # slow, and without asserts of jaxllm
PROCESSORS = [f"--logits-processors=tests.server.test_verdicts:{name}" for name in ("no_change", "no_change_either")]


@pytest.mark.slow
def test_hostile_input_and_faults_have_the_same_verdicts() -> None:
    """The canaries must fail; they would pass if the tests' assertions were removed too."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", "-k", LEFT_OUT]
    done = subprocess.run(
        [*command, *SELECTED, "tests/fuzz/canaries.py"], cwd=ROOT, env=OPTIMIZED, capture_output=True, text=True
    )
    failed = [line.partition(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    canaries = ("an_assertion_of_a_test_is_kept", "an_assertion_of_what_tests_share_is_kept")
    assert failed == [f"FAILED tests/fuzz/canaries.py::test_{name}" for name in canaries], done.stdout + done.stderr


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    with ServingProcess(*QUICK, *PROCESSORS, env={"PYTHONOPTIMIZE": "1"}) as server:
        clients = Clients(server.http, server.grpc)
        yield clients
        clients.close()


@pytest.mark.ci
def test_a_server_has_the_same_verdicts(clients: Clients) -> None:
    wrong = []

    def judge(fields: dict[str, Any], over_grpc: object, over_http: object) -> None:
        verdicts = clients.over_grpc(fields), clients.over_http(fields)
        if verdicts != (over_grpc, over_http):
            wrong.append((fields, verdicts))

    for name, value in GOOD:
        more = {"top_k": 3} if name in ("temperature", "seed") else {}
        judge({**BASE, **more, name: value}, ACCEPTED, ACCEPTED)
    for name, value in BAD:
        judge({**BASE, name: value}, Refused(name), Refused(name if is_json(value) else None))
    for fields, name in TOGETHER:
        judge({**BASE, **fields}, Refused(name), Refused(name))
    for name, most, more in EDGES:
        judge({**BASE, name: most}, ACCEPTED, ACCEPTED)
        judge({**BASE, name: more}, Refused(name), Refused(name))
    assert not wrong
