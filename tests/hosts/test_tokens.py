"""Two processes of two devices: the same tokens as one process with one device, and a planted divergence is found."""

from __future__ import annotations

import json
import subprocess

import pytest

from jaxllm import LLMEngine
from jaxllm.engine.input_batch import InputBatch
from tests.hosts import group
from tests.support.paths import STORIES

pytestmark = pytest.mark.ci


def run(count: int, **environment: str) -> list[tuple[int, str, str]]:
    """Run a group of two; return each process's exit code, output and log."""
    address, module = group.free_address(), "tests.hosts.group"
    env = group.environment(**environment)
    with (
        group.process(module, "0", address, str(count), env=env, stdout=subprocess.PIPE) as leader,
        group.process(module, "1", address, str(count), env=env) as follower,
    ):
        ended = []
        for each in (leader, follower):
            out, log = each.communicate(timeout=3000)
            ended.append((each.returncode, out or "", log))
        return ended


@pytest.mark.parametrize(
    ("count", "stages"),
    [(40, "1"), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((40, "2"), (1000, "1")))],
)
def test_the_tokens_are_those_of_one_device(count: int, stages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix cache, preemption, chunks, sampling fields, grammars, beams, aborts, one failed request: no divergence.

    Each process has a part of all matrices, or is a pipeline stage.
    """
    (code, out, log), (followers_code, _, followers_log) = run(count, STAGES=stages)
    assert (code, followers_code) == (0, 0), log + followers_log
    preempted, hit, tokens, numbers = json.loads(out.splitlines()[-1])
    print(numbers)
    monkeypatch.setattr(InputBatch, "place", InputBatch.place)
    group.fail_to_place(group.FAILING)
    alone = LLMEngine.from_engine_args(str(STORIES), **group.SETTINGS)
    _, _, expected = group.answers(alone, count)
    alone.close()
    assert preempted and hit and numbers["recoveries"] == 1
    assert numbers["read"] <= numbers["held"] < numbers["whole"], "each process reads its parts only"
    assert len(tokens) > 0.5 * count
    assert {name: tokens[name] for name in tokens if name in expected} == {
        name: expected[name] for name in expected if name in tokens
    }
    assert len(tokens.keys() & expected.keys()) > 0.5 * count


@pytest.mark.parametrize(("fault", "what"), [(group.PLAN, "plan 12 differs"), (group.TOKEN, "the leader's batch has")])
def test_a_divergence_is_found_in_its_step(fault: str, what: str) -> None:
    (code, out, log), (followers_code, _, followers_log) = run(50, FAULT=fault)
    assert (code, followers_code) == (1, 1)
    assert '"recoveries"' not in out, "the requests were answered"
    assert what in log and what in followers_log
    assert "checksum" in followers_log
