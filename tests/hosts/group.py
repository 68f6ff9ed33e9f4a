"""Processes of a group: `python -m tests.hosts.group` is one with requests of a test, or with a fault.

The leader writes its answers to standard output. In the environment, STAGES of a pipeline share the four devices, and
with FAULT a follower does wrong in that step.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxllm import LLMEngine, SamplingParams
from jaxllm.beam_search_params import BeamSearchParams
from jaxllm.checkpoints import weights
from jaxllm.engine.input_batch import InputBatch
from jaxllm.request_params import RequestParams
from tests.engine.test_combinations import combination
from tests.support.paths import ROOT, STORIES
from tests.support.sizes import FEW_BLOCKS

VOCABULARY = 512
SETTINGS: dict[str, Any] = {"max_model_len": 128, "max_logprobs": -1, **FEW_BLOCKS}
HANG, PLAN, TOKEN = "hang", "plan", "token"  # faults
FAULTY_STEP = 12
FAILING = "8"  # a request that the engine fails to place


def environment(**further: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'server'}",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAXLLM_CACHE_BYTES": str(1 << 30),
        **further,
    }


def free_address() -> str:
    """Return an address with a free port, followed by another free port."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = first.getsockname()[1]
            try:
                stack.enter_context(socket.create_server(("127.0.0.1", port + 1)))
            except OSError:
                continue
            return f"127.0.0.1:{port}"


def flags(rank: int, address: str) -> tuple[str, ...]:
    own = ("--num-hosts", "2", "--host-rank", str(rank), "--coordinator", address, "--tensor-parallel-size", "4")
    return own + ("--headless",) * (rank > 0)


@contextmanager
def process(*command: str, env: dict[str, str], **given: Any) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-m", *command], env=env, text=True, stderr=subprocess.PIPE, start_new_session=True, **given
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def request(number: int) -> tuple[list[int], RequestParams]:
    """Make a prompt, sharing its beginning with those of nearby numbers, and its parameters."""
    draws = np.random.default_rng([number // 5, 1]), np.random.default_rng([number, 2])
    counts = 20, int(draws[1].integers(1, 60))
    prompt = [each for own, count in zip(draws, counts, strict=True) for each in own.integers(3, 500, count).tolist()]
    if number % 10 == 3:
        return prompt[:30], BeamSearchParams(beam_width=3, max_tokens=6)
    params = combination(number, VOCABULARY)
    params = replace(params, extra_args=None, truncate_prompt_tokens=None)  # no processors here
    if number % 10 == 7:
        params = SamplingParams(structured_outputs={"regex": "(one|two|three) [a-z]{3,9}"}, max_tokens=12, seed=number)
    return prompt, params


def fail_to_place(victim: str) -> None:
    """Let the engine fail when it places a request."""
    place = InputBatch.place

    def faulty(self: InputBatch, slot: int, sequence: Any) -> None:
        if sequence.group.request_id == victim:
            raise RuntimeError("planted")
        place(self, slot, sequence)

    InputBatch.place = faulty


def count_weights() -> dict[str, int]:
    """Count the numbers of weights that are read, and those that this process and all processes hold."""
    fill, load, counts = weights.fill, weights.load, {"read": 0, "held": 0, "whole": 0}

    def counted(store: Any, *given: Any) -> None:
        def counting(row: int, block: np.ndarray) -> None:
            counts["read"] += block.size
            store(row, block)

        fill(counting, *given)

    def loaded(*given: Any) -> Any:
        params = load(*given)
        for leaf in jax.tree.leaves(params):
            counts["held"] += sum(shard.data.size for shard in leaf.addressable_shards)
            counts["whole"] += leaf.size
        return params

    weights.fill, weights.load = counted, loaded
    return counts


def answers(engine: LLMEngine, count: int) -> list[Any]:
    """Run requests that arrive and are aborted at random; return the tokens of those that were not aborted."""
    random, next_one, live, found = np.random.default_rng(count), 0, set[str](), {}
    while next_one < count or engine.has_unfinished_requests():
        for _ in range(int(random.integers(0, 4)) if next_one < count else 0):
            prompt, params = request(next_one)
            engine.add_request(str(next_one), {"prompt_token_ids": prompt}, params)
            live.add(str(next_one))
            next_one = min(count, next_one + 1)
            if next_one == count:
                break
        if live and random.random() < 0.1:
            victim = str(random.choice(sorted(live)))
            engine.abort_request(victim)
            live.discard(victim)
        for output in engine.step():
            if output.finished and output.request_id in live:
                live.discard(output.request_id)
            if output.finished:
                found[output.request_id] = [list(one.token_ids) for one in output.outputs]
    return [engine.metrics.preemptions > 0, engine.metrics.cached_tokens > 0, found]


def main() -> int:
    from jaxllm.config import EngineArgs
    from jaxllm.hosts.settings import HostSettings

    rank, address, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    stages = int(os.environ.get("STAGES", "1"))
    config = EngineArgs(str(STORIES), **SETTINGS, tensor_parallel_size=4 // stages, pipeline_parallel_size=stages)
    settings = HostSettings(num_hosts=2, rank=rank, coordinator=address)
    if rank:
        from jaxllm.hosts.follower import Follower

        plant(os.environ.get("FAULT", ""))
        return Follower(settings).run(config)
    from jaxllm.hosts.leader import Leader

    counts = count_weights()
    engine = Leader(settings).make_engine(config)
    fail_to_place(FAILING)
    began = time.monotonic()
    found = answers(engine, count)
    numbers = {
        "steps": engine.metrics.steps,
        "seconds": time.monotonic() - began,
        "recoveries": engine.metrics.recoveries,
    }
    print(json.dumps([*found, numbers | counts]), flush=True)
    engine.close()
    return 0


def plant(fault: str) -> None:
    """Make this follower do wrong in a step."""
    from jaxllm.hosts.follower import Steps
    from jaxllm.hosts.frames import Call
    from jaxllm.replay.recording import Kind

    take = Steps.take

    def faulty(self: Any, message: list[Any]) -> None:
        if message[0] == Call.STEP and fault == HANG and message[1] > 1:
            time.sleep(1000)
        if message[0] == Call.STEP and fault == TOKEN and message[1] >= FAULTY_STEP:
            self._sampling[:] += 1  # another seed
        if message[0] == Kind.PLAN and message[2] == FAULTY_STEP and fault == PLAN:
            self._replayer.core.state = self._replayer.core.state._replace(num_admitted=99)
            self._replayer.core.limits = replace(self._replayer.core.limits, max_step_tokens=8)
        take(self, message)

    Steps.take = faulty


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
