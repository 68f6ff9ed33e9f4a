"""Two adapters that loop do not delay a third, and a client is refused for a while after its work was stopped."""

from __future__ import annotations

import asyncio
import threading

import pytest

from jaxllm.engine.language_threads import LanguageThreads
from jaxllm.text.confinement import ConfinedError, exceeded


async def test_a_language_has_one_thread_and_its_clients_take_turns() -> None:
    threads, gate, order = LanguageThreads(), threading.Event(), []

    def loop() -> None:
        assert gate.wait(10)

    loops = [asyncio.ensure_future(threads.run(name, "a", loop)) for name in (b"1", b"2", b"1", b"2", b"1")]
    late = asyncio.ensure_future(threads.run(b"1", "b", order.append, "b"))
    last = asyncio.ensure_future(threads.run(b"1", "a", order.append, "a"))
    async with asyncio.timeout(5):
        await threads.run(b"3", "c", order.append, "third")
        await threads.run(b"", "c", order.append, "reading")
    assert order == ["third", "reading"] and not any(each.done() for each in (*loops, late))
    gate.set()
    await asyncio.gather(*loops, late, last)
    assert order[2:] == ["b", "a"]
    threads.shutdown()


async def test_a_client_whose_work_was_ended_twice_is_refused_for_a_minute() -> None:
    now, runs = 0.0, []
    threads = LanguageThreads(clock=lambda: now)

    def end() -> None:
        runs.append(now)
        raise exceeded("takes too much")

    asked = [asyncio.ensure_future(threads.run(b"1", "a", end)) for _ in range(4)]
    said = [str(each) for each in await asyncio.gather(*asked, return_exceptions=True)]
    assert len(runs) == 2 and sum("takes too much" in each for each in said) == 2, "those that waited, too"
    assert sum("2 times and is refused for 60 s" in each for each in said) == 2
    assert await threads.run(b"1", "b", lambda: 1) == 1 == await threads.run(b"2", "a", lambda: 1)
    now = 59.9
    with pytest.raises(ConfinedError, match="refused"):
        await threads.run(b"1", "a", end)
    now = 60.1
    with pytest.raises(ConfinedError, match="takes too much"):
        await threads.run(b"1", "a", end)
    assert await threads.run(b"1", "a", lambda: 1) == 1, "counted anew"
    for _ in range(3):
        with pytest.raises(ConfinedError, match="takes too much"):
            await threads.run(b"", "a", end)
    assert await threads.run(b"", "a", lambda: 1) == 1, "reading of another adapter"
    threads.shutdown()
