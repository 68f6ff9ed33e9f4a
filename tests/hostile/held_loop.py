"""`python -m tests.hostile.held_loop serve …`: jaxllm with a path `/held` that measures blocking of its event loop.

`/held` returns the longest processor time of one thread between two turns of the loop since the last request for it: of
the loop's thread, or of another that held the interpreter. Other processes do not affect it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from jaxllm.commands import cli
from jaxllm_server.http import app as front

MOST_SECONDS = 0.05  # between two turns of the loop
TURN = 0.0005  # seconds between two turns of the timer


class Timer:
    """Measures the longest processor time of a thread between two turns."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._last: dict[int, float] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TURN)
            self.turn()

    def turn(self) -> None:
        now: dict[int, float] = {}
        for thread in threading.enumerate():
            if thread.ident is not None:
                try:
                    now[thread.ident] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
                except OSError:  # the thread has ended
                    continue
        for ident, seconds in now.items():
            self.longest = max(self.longest, seconds - self._last.get(ident, seconds))
        self._last = now


def main() -> None:
    make = front.make_app

    def make_timed(*given: Any) -> Any:
        app, timer = make(*given), Timer()
        running: list[asyncio.Task[None]] = []

        async def timed(scope: Any, receive: Any, send: Any) -> None:
            if not running:
                running.append(asyncio.ensure_future(timer.run()))
            if scope["path"] != "/held":
                await app(scope, receive, send)
                return
            timer.turn()
            body = f"{timer.longest:.6f}".encode()
            timer.longest = 0.0
            headers = [(b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

        return timed

    front.make_app = make_timed
    cli.run()


if __name__ == "__main__":
    main()
