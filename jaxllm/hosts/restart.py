"""Run a command in a child process, and restart it when it fails."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

_log = logging.getLogger(__name__)
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before a restart, doubled …
WELL_SECONDS = 60.0  # … and reset after this long
LOOK_SECONDS = 0.1
FINAL = (0, 2, 130)  # exit codes: a drain, wrong usage, ^C


PARENT = "_JAXLLM_RESTART_PARENT"  # a child's variable: its parent's process id


def is_child() -> bool:
    return PARENT in os.environ


def end_with_parent() -> None:
    """End this process once the parent that restarts it has ended."""
    parent = int(os.environ[PARENT])

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="jaxllm-parent", daemon=True).start()


def keep_running(command: Sequence[str], stopped_seconds: float) -> int:
    """Run a command until its exit code is in `FINAL`, or SIGTERM or SIGINT, passed on to it; return the code.

    A child stopped (SIGSTOP) for `stopped_seconds` is killed and started again.
    """
    signalled: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _: object) -> None:
        signalled.append(number)
        if child is not None:
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    wait = FIRST_WAIT
    while True:
        began = time.monotonic()
        child = subprocess.Popen(
            command, env=os.environ | {PARENT: str(os.getpid())}, start_new_session=True
        )  # ^C reaches only this process
        code = _wait(child, stopped_seconds)
        if signalled or code in FINAL:
            return code
        wait = FIRST_WAIT if time.monotonic() - began > WELL_SECONDS else wait
        _log.warning("the server ended with code %d; it will be restarted in %.1f s", code, wait)
        end = time.monotonic() + wait
        while time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
            if signalled:
                return code
        wait = min(2 * wait, LONGEST_WAIT)


def _wait(child: subprocess.Popen[bytes], stopped_seconds: float) -> int:
    stopped: float | None = None
    while True:
        if child.poll() is not None:
            return child.returncode
        state = None
        with suppress(ChildProcessError, AttributeError):  # it has ended; macOS has no `waitid`
            state = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        if state is not None:
            stopped = time.monotonic() if state.si_code == os.CLD_STOPPED else None
        if stopped is not None and time.monotonic() - stopped > stopped_seconds:
            _log.warning("the server is stopped (SIGSTOP) for %.0f s; it is killed", stopped_seconds)
            child.kill()
            stopped = None
        time.sleep(LOOK_SECONDS)
