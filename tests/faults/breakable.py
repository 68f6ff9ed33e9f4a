"""`python -m tests.faults.breakable serve …`: a jaxllm server with faults that signals, prompts and chance trigger.

SIGUSR1: the next step kills the engine's thread. SIGUSR2: the next step hangs until the signal arrives again. A prompt
that begins with NAN has logits that are not numbers; detokenizing an output fails if the prompt begins with UNTOLD.
With SOAK_REPORT in the environment every FAILING_STEPSth step fails and loses the cache, and for each SIGHUP the
process appends a JSON line with its memory, descriptors, threads and tasks to that file.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.commands import cli
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.sequence import Sequence
from jaxllm.outputs import RequestOutput
from jaxllm.runner.model_runner import Runner
from jaxllm.scheduler.recorded import RecordedScheduler
from jaxllm_server.launch import Server
from tests.support import inspection

HANG_SECONDS = 30.0  # at most
NAN, UNTOLD = 999, 998
FAILING_STEPS = 500
REPORT = os.environ.get("SOAK_REPORT")


def break_steps_on_signals() -> None:
    orders: list[int] = []
    real = LLMEngine.step

    def step(engine: LLMEngine) -> list[RequestOutput]:
        if orders:
            if orders.pop() == signal.SIGUSR1:
                raise SystemError("secret of /home at 0xdeadbeef")
            end = time.monotonic() + HANG_SECONDS
            while not orders and time.monotonic() < end:
                time.sleep(0.01)
            orders.clear()
        return real(engine)

    LLMEngine.step = step
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda order, _: orders.append(order))


def break_requests() -> None:
    commit, advance = RecordedScheduler.commit, Sequence.advance

    def commit_with_nan(
        core: RecordedScheduler, plan: Any, tokens: np.ndarray, is_finite: np.ndarray | None = None, *counts: Any
    ) -> Any:
        owners = [core.requests.get(owner) for owner in core.state.slots.ids[plan.slots].tolist()]
        bad = np.array([owner is not None and owner.tokens[0] == NAN for owner in owners], np.bool_)
        if bad.any():
            is_finite = ~bad if is_finite is None else is_finite & ~bad
        return commit(core, plan, tokens, is_finite, *counts)

    def advance_or_fail(sequence: Sequence, *arguments: Any) -> Any:
        if sequence.tokens[0] == UNTOLD:
            raise RuntimeError("secret of /home at 0xdeadbeef")
        return advance(sequence, *arguments)

    RecordedScheduler.commit, Sequence.advance = commit_with_nan, advance_or_fail


def break_steps_now_and_then() -> None:
    dispatch, calls = Runner.dispatch, 0

    def failing(runner: Runner, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % FAILING_STEPS == 0:
            inspection.lose_state(runner)
            raise RuntimeError("the device said no")
        return dispatch(runner, *arguments)

    Runner.dispatch = failing


def report_on_signals(path: str) -> None:
    run = Server.run

    async def reporting(server: Server) -> int:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, write)
        return await run(server)

    def write() -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        held = {
            "bytes": 1024 * sum(int(status[name].split()[0]) for name in ("RssAnon", "VmSwap")),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": int(status["Threads"]),
            "tasks": len(asyncio.all_tasks()),
            "device_bytes": sum(array.nbytes for array in jax.live_arrays()),
        }
        with open(path, "a") as file:
            file.write(json.dumps(held) + "\n")

    Server.run = reporting


def main() -> None:
    break_steps_on_signals()
    break_requests()
    if REPORT is not None:
        break_steps_now_and_then()
        report_on_signals(REPORT)
    cli.run()


if __name__ == "__main__":
    main()
