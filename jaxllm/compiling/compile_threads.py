"""Run compilations at idle priority, so that they do not slow down steps."""

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
    """Make a call in a new thread of idle priority; return its result, or raise its exception.

    Not for tracing, which holds the GIL and would delay steps.
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
    """Give this thread, and XLA:CPU's LLVM threads, idle priority.

    LLVM's threads, created by the first compilation, do two thirds of the work and do not inherit priority. They keep
    it, since raising it may need privileges: later engines start more slowly on busy machines.
    """
    if sys.platform != "linux":
        return
    threads = [threading.get_native_id()]
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it may have ended
            if (thread / "comm").read_text().startswith("llvm-worker"):
                threads.append(int(thread.name))
    for thread in threads:
        with suppress(ProcessLookupError, PermissionError):  # forbidden in some sandboxes
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
