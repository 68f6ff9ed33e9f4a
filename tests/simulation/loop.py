"""An asyncio event loop in virtual time, which runs ready callbacks, in order, on each call of `run`."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

MOST_CALLBACKS = 200_000  # most of one call of `run`; more are an endless loop


class Loop(asyncio.AbstractEventLoop):
    """The methods of an event loop that `AsyncLLM` and its clients use."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.time = clock  # type: ignore[method-assign]
        self.failures: list[BaseException] = []  # of callbacks and of tasks that were not awaited
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self.held: list[Callable[[], None]] | None = None  # functions of executors, held back if not None

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **_: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run a function in the next callback, as a fast thread would; while `held` is a list, append it there."""
        future = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

        if self.held is None:
            self.call_soon(run)
        else:
            self.held.append(run)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.failures.append(context.get("exception") or RuntimeError(context["message"]))

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: `run` skips cancelled timers."""

    def next_timer(self) -> float | None:
        """Return the time of the first timer, or None."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def run(self) -> None:
        """Run all ready callbacks and due timers, and the callbacks that these add; raise their errors."""
        now, ready = self.time(), self._ready
        while self._timers and self._timers[0][0] <= now:
            handle = heapq.heappop(self._timers)[2]
            if not handle.cancelled():
                ready.append(handle)
        if not ready:
            return
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            for _ in range(MOST_CALLBACKS):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
                if not ready:
                    break
            else:
                raise RuntimeError("the event loop does not come to rest")
        finally:
            asyncio._set_running_loop(outer)
        if self.failures:
            raise self.failures.pop()
