"""Operations that failed for lack of descriptors, memory or threads succeed later: the failure is not cached.

A site is a function that makes an attempt: under exhaustion it fails or falls back, and afterward it succeeds.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from jaxllm.compiling.compile_noise import StandardError
from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.fair_threads import FairThreads
from jaxllm.fleet import supervisor
from jaxllm.fleet.supervisor import MOST_FAILED_STARTS, Supervisor
from jaxllm.metrics import Metrics
from jaxllm.runner import compiled_programs
from jaxllm.runner.batch import decode_shapes
from jaxllm.runner.compiled_programs import Key, ProgramTable
from jaxllm.structured_output.grammars import Grammars
from jaxllm.structured_outputs_params import StructuredOutputsParams
from jaxllm.text import chat_template
from jaxllm.text.tokenizer import load_tokenizer
from pallas_kernels.native import build
from tests.support import paths

Attempt = Callable[[], bool]
STORIES = str(paths.STORIES)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let the process open no more files."""
    before, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, before[1]))
    try:
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in held:
            os.close(each)


@contextmanager
def no_threads() -> Iterator[None]:
    """Let the process start no thread."""
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        yield


_has_memory, _is_exhausted = True, False


@contextmanager
def no_memory() -> Iterator[None]:
    """Let `check_memory` find no free memory."""
    global _has_memory
    _has_memory = False
    try:
        yield
    finally:
        _has_memory = True


def check_memory() -> None:
    if not _has_memory:
        raise MemoryError


def _program(patch: pytest.MonkeyPatch) -> Attempt:
    patch.setattr(compiled_programs, "RETRY_SECONDS", 0.0)

    def lower(_: Key) -> Any:
        check_memory()
        return SimpleNamespace(compile=lambda: "compiled")

    key = Key(decode_shapes(2)[0], None, "forward")
    table = ProgramTable((), [key], lower, Metrics())
    table.follow(1)

    def attempt() -> bool:
        end = time.monotonic() + (0.15 if _is_exhausted else 10.0)  # a busy machine may start the thread late
        while table.first_ready([(key,)]) is None and time.monotonic() < end:
            time.sleep(0.01)
        return key in table.ready()

    return attempt


def _kernels(patch: pytest.MonkeyPatch) -> Attempt:
    if build.refusal():
        pytest.skip(str(build.refusal()))
    patch.setattr(build, "RETRY_SECONDS", 0.0)
    patch.setattr(build, "refused", build.Refusal())
    return lambda: build.refusal() is None


def _standard_error(patch: pytest.MonkeyPatch) -> Attempt:
    error = StandardError()
    error.hide()

    def attempt() -> bool:
        before = os.fstat(2)
        with error.hidden("gpu"):
            return os.fstat(2).st_ino != before.st_ino

    return attempt


def _tokenizing(patch: pytest.MonkeyPatch) -> Attempt:
    threads = FairThreads(2, "test")
    return lambda: asyncio.run(threads.run("client", lambda: True))


def _engine(patch: pytest.MonkeyPatch) -> Attempt:
    class Thread:
        def __init__(self, **given: Any) -> None:
            self.ready, self.step_since = given["listeners"].ready, None

        def start(self) -> None:
            threading.Thread(target=int).start()
            asyncio.get_running_loop().call_soon(self.ready, None)

    llm = AsyncLLM(STORIES, thread_type=Thread)  # type: ignore[arg-type]

    async def start() -> bool:
        await asyncio.wait_for(llm.start(), 5)
        return True

    return lambda: asyncio.run(start())


def _grammar(patch: pytest.MonkeyPatch) -> Attempt:
    grammars = Grammars(load_tokenizer(STORIES), 512, [2])
    return lambda: grammars.compile(StructuredOutputsParams(regex="[a-z]+")).begin().error is None


def _tokenizer(patch: pytest.MonkeyPatch) -> Attempt:
    return lambda: bool(load_tokenizer(STORIES).encode("Once"))


def _template(patch: pytest.MonkeyPatch) -> Attempt:
    source = "{% for m in messages %}{{ m.content[0].text if m.content is not string else m.content }}{% endfor %}"
    shape, generated = chat_template.compile_template(source).shape, chat_template.generated

    def generate(*arguments: Any) -> str:
        check_memory()
        return generated(*arguments)

    patch.setattr(chat_template, "generated", generate)
    return lambda: chat_template.compile_template(source).shape == shape


def _replica(patch: pytest.MonkeyPatch) -> Attempt:
    """A replica's process, which may be started only as often as a replica may fail."""
    patch.setattr(supervisor, "FIRST_WAIT", 0.0)
    tried = 0

    async def keep() -> bool:
        started = asyncio.Event()

        class Replica(SimpleNamespace):
            def start(self, *_: Any) -> None:
                nonlocal tried
                tried += 1
                if tried <= 2 * MOST_FAILED_STARTS:
                    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
                started.set()

            async def reap(self) -> None: ...

        replica: Any = Replica(number=0, error=None, model=None, is_given_up=False)
        own = Supervisor([replica], mock.Mock(), lambda *_: (None, {}), hang_timeout=1, module="", address=None)  # type: ignore[arg-type,return-value]
        with mock.patch.object(own, "until_lost", lambda _: asyncio.sleep(3600)):
            keeping = asyncio.ensure_future(own.keep(replica, ""))
            both = [keeping, asyncio.ensure_future(started.wait())]
            done, _ = await asyncio.wait(both, timeout=5, return_when="FIRST_COMPLETED")
            keeping.cancel()
            return started.is_set() and keeping not in done

    return lambda: asyncio.run(keep())


SITES = [
    (_program, no_threads),
    (_program, no_memory),
    (_kernels, no_descriptors),
    (_standard_error, no_descriptors),
    (_tokenizing, no_threads),
    (_engine, no_threads),
    (_grammar, no_threads),
    (_tokenizer, no_descriptors),
    (_template, no_memory),
]


@pytest.mark.filterwarnings("ignore:nothing can be compiled")
@pytest.mark.parametrize(("site", "exhausted"), SITES, ids=lambda each: each.__name__.strip("_"))
def test_what_failed_for_want_of_something_works_when_it_is_there(
    site: Callable[[pytest.MonkeyPatch], Attempt], exhausted: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = site(monkeypatch)
    for _ in range(3):  # once more than a program may fail
        works = False
        monkeypatch.setattr(sys.modules[__name__], "_is_exhausted", True)
        with exhausted(), suppress(Exception):
            works = attempt()
        assert not works, "nothing was exhausted"
    monkeypatch.setattr(sys.modules[__name__], "_is_exhausted", False)
    assert attempt()


def test_a_replica_that_no_process_can_be_started_for_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _replica(monkeypatch)()
