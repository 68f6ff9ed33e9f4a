"""Clients take turns in the worker threads of `FairThreads`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from jaxllm.engine.fair_threads import FairThreads


class Site:
    """Run work that waits until it is released; record which work has begun and which has run."""

    def __init__(self, num_threads: int) -> None:
        self.threads = FairThreads(num_threads, "test")
        self.begun: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def ask(self, client: str | None, name: str) -> asyncio.Task[str]:
        self._gates[name] = threading.Event()
        return asyncio.ensure_future(self.threads.run(client, self._work, name))

    def _work(self, name: str) -> str:
        self.begun.append(name)
        assert self._gates[name].wait(10)
        return name

    def end(self, *names: str) -> None:
        for name in names or self._gates:
            self._gates[name].set()

    async def wait_begun(self, *names: str) -> None:
        """Wait until the named work has begun, and a moment longer for work that should not begin."""
        async with asyncio.timeout(5):
            while len(self.begun) < len(names):
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert self.begun == list(names)


def run(work: Callable[[Site], Awaitable[None]], num_threads: int = 2) -> None:
    async def whole() -> None:
        site = Site(num_threads)
        try:
            await work(site)
        finally:
            site.end()
            site.threads.shutdown()

    asyncio.run(whole())


def test_a_client_never_has_the_last_thread_and_the_others_take_turns() -> None:
    async def work(site: Site) -> None:
        asked = [site.ask("a", f"a{number}") for number in range(3)]
        await site.wait_begun("a0")
        asked += [site.ask("b", "b0"), site.ask("b", "b1"), site.ask("c", "c0")]
        begun = ["a0", "b0"]
        await site.wait_begun(*begun)
        for ended, next_one in (("a0", "a1"), ("b0", "b1"), ("a1", "c0"), ("c0", "a2")):  # c0 before a2
            site.end(ended)
            begun.append(next_one)
            await site.wait_begun(*begun)
        site.end()
        assert await asyncio.gather(*asked) == ["a0", "a1", "a2", "b0", "b1", "c0"]

    run(work)


def test_who_is_no_client_has_all_threads() -> None:
    async def work(site: Site) -> None:
        site.ask(None, "0")
        site.ask(None, "1")
        await site.wait_begun("0", "1")

    run(work)


def test_what_is_cancelled_before_its_turn_never_runs_and_what_runs_keeps_its_thread() -> None:
    async def work(site: Site) -> None:
        running, waiting = site.ask("a", "a0"), site.ask("a", "a1")
        await site.wait_begun("a0")
        for task in (waiting, running):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        last = site.ask("a", "a2")
        await site.wait_begun("a0")  # keeps its thread
        site.end()
        assert await last == "a2" and site.begun == ["a0", "a2"]

    run(work)


def test_nothing_begins_after_the_end() -> None:
    async def work(site: Site) -> None:
        site.threads.shutdown()
        for name in ("0", "1", "2"):  # each releases its turn
            with pytest.raises(RuntimeError):
                await asyncio.wait_for(site.ask("a", name), 5)

    run(work)


@pytest.mark.parametrize("num_turns", range(8))
def test_who_leaves_as_a_thread_becomes_free_loses_no_turn_of_others(num_turns: int) -> None:
    async def work(site: Site) -> None:
        first, leaving, patient = (site.ask("a", name) for name in ("a0", "a1", "a2"))
        await site.wait_begun("a0")
        site.end("a0", "a1", "a2")
        time.sleep(0.05)  # the thread has finished, but the loop has not yet processed that
        for _ in range(num_turns):
            await asyncio.sleep(0)
        leaving.cancel()
        async with asyncio.timeout(5):
            assert (await first, await patient) == ("a0", "a2")
        assert leaving.cancelled() or leaving.result() == "a1"

    run(work)
