"""Tests that a consumer continues when its producer, another process, is killed or stopped in mid-transfer."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxllm import SamplingParams
from tests.engine.test_kv_transfer import config_of, engines, run

TIMEOUT = 3.0  # seconds in which blocks must arrive
MODEL = "qwen3"


@pytest.mark.ci
@pytest.mark.parametrize("number", [None, signal.SIGKILL, signal.SIGSTOP], ids=str)
def test_a_lost_producer_costs_no_more_than_the_deadline(number: signal.Signals | None) -> None:
    pause = "0" if number is None else "0.1"
    command = [sys.executable, "-m", "tests.engine.kv_producer", MODEL, pause]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    transfer = {"kv_connector_extra_config": {"timeout": TIMEOUT}}
    try:
        with engines(config_of(MODEL), config_of(MODEL, "kv_consumer", transfer)) as (one, receiver):
            assert json.loads(process.stdout.readline()) == "ready"
            for seed in (1, 2):
                ids = random.Random(seed).choices(range(3, 120), k=60)
                process.stdin.write(json.dumps(ids) + "\n")
                process.stdin.flush()
                told = json.loads(process.stdout.readline())
                params = SamplingParams(temperature=0.9 * (seed == 2), seed=7, max_tokens=16, ignore_eos=True)
                began = time.monotonic()
                if seed == 2 and number is not None:
                    threading.Timer(0.4, process.send_signal, [number]).start()
                output = run(receiver, ids, params, told)
                assert time.monotonic() - began < TIMEOUT + 3
                assert output.outputs[0].token_ids == run(one, ids, params).outputs[0].token_ids
                if seed == 1 or number is None:
                    assert output.num_cached_tokens == 56 and not receiver.metrics.transfer_failures
            if number is not None:  # the blocks before the loss were used
                assert 0 < (output.num_cached_tokens or 0) < 56 and receiver.metrics.transfer_failures == 1
    finally:
        process.kill()
        process.wait()
