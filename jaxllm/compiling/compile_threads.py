"""Compiling behind the steps of a serving engine."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxllm.threads import start_thread


def run_at_idle_priority(call: Callable[[], Any]) -> Any:
    """Run `call` on a thread of low priority and return its result.

    Only for compiling: a thread of low priority that holds the interpreter's lock, as in tracing, would delay steps.
    """
    outcome: Future[Any] = Future()

    def work() -> None:
        try:
            _take_idle_priority()
            outcome.set_result(call())
        except BaseException as failure:
            outcome.set_exception(failure)

    start_thread(work, "jaxllm-compile-behind")
    return outcome.result()


def _take_idle_priority() -> None:
    """Give this thread, and those in which XLA's CPU back end runs LLVM, idle priority, so that steps go first.

    LLVM's threads are made by a process's first compilation and do two thirds of the work; they do not inherit the
    priority of the calling thread. They keep the low priority, since raising it may need privileges: a later engine of
    the process starts more slowly where other programs keep all cores busy (DECISIONS 40).
    """
    if sys.platform != "linux":
        return
    threads = [threading.get_native_id()]
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it may have ended
            if (thread / "comm").read_text().startswith("llvm-worker"):
                threads.append(int(thread.name))
    for thread in threads:
        with suppress(ProcessLookupError, PermissionError):  # a sandbox may forbid it
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
