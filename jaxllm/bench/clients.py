"""The client processes of a load test; their clock is `time.perf_counter`."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol, Self

from jaxllm.bench.outcome import Outcome
from jaxllm.bench.target import Target
from jaxllm.bench.workload import Job
from jaxllm.errors import EngineError, UserError
from jaxllm.file_limit import raise_file_limit

HEAD_START = 0.05  # seconds, to the run's start
LIMIT = 0.7  # of a core; above, clients may delay


class BenchClient(Protocol):
    """A client of a server."""

    async def send(self, name: str, job: Job, outcome: Outcome) -> None:
        """Send a job; record its result or error in `outcome`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


@dataclass(frozen=True)
class Share:
    """The work of one process; `jobs` are sorted by arrival, in seconds."""

    target: Target
    jobs: Sequence[tuple[int, Job, float]]  # with index in the run
    warmups: Sequence[tuple[int, Job]]
    max_concurrency: int | None


@dataclass(frozen=True)
class Ready:
    """A process is ready; `failures` are of warm-up requests."""

    failures: Sequence[str]


@dataclass(frozen=True)
class Cost:
    """CPU and wall time of a process, and messages received."""

    cpu_seconds: float
    wall_seconds: float
    messages: int

    @property
    def core_share(self) -> float:
        return self.cpu_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0


class ClientProcess:
    """A process that sends a share of a benchmark's requests.

    Sends `Ready`, waits for `start`, and sends an `Outcome` per job, then `Cost`. Ignores ^C, and exits if the parent
    dies.
    """

    def __init__(self, share: Share) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, own = context.Pipe()
        self._process = context.Process(target=_run, args=(own, share), daemon=True)
        self._process.start()
        own.close()

    def wait_ready(self) -> Ready:
        """Wait until the process is ready. Raises `EngineError` if it exits instead."""
        try:
            return self.connection.recv()
        except EOFError:
            raise EngineError("a client process exited before the run; its output is above.") from None

    def start(self, at: float) -> None:
        self.connection.send(at)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(None)

    def close(self) -> None:
        self.connection.close()
        self._process.join(1.0)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(1.0)


def deal(
    target: Target,
    jobs: Sequence[tuple[int, Job, float]],
    warmups: Sequence[Job],
    max_concurrency: int | None,
    num_processes: int,
) -> list[Share]:
    count = max(1, min(num_processes, len(jobs), max_concurrency or num_processes))
    caps = [
        None if max_concurrency is None else max_concurrency // count + (number < max_concurrency % count)
        for number in range(count)
    ]
    numbered = list(enumerate(warmups))
    return [Share(target, jobs[number::count], numbered[number::count], caps[number]) for number in range(count)]


def open_client(target: Target) -> BenchClient:
    """Return a client of the target's protocol; raise `UserError` without its library."""
    try:
        if target.is_grpc:
            from jaxllm.bench.grpc_client import GrpcClient

            return GrpcClient(target)
        from jaxllm.bench.openai_client import OpenAIClient
    except ImportError as error:
        raise UserError(f"a client of {target.backend} needs {error.name}: pip install 'jaxllm[bench]'") from error
    return OpenAIClient(target)


async def send_one(target: Target, job: Job) -> Outcome:
    outcome = Outcome(0, job.prompt_tokens, job.max_tokens)
    async with open_client(target) as client:
        await client.send("test", job, outcome)
    return outcome


def _run(connection: Connection, share: Share) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_file_limit()
    try:
        asyncio.run(_send_all(connection, share))
    except* (BrokenPipeError, EOFError):  # the parent died
        pass


async def _send_all(connection: Connection, share: Share) -> None:
    gate: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
    if share.max_concurrency is not None:
        gate = asyncio.Semaphore(share.max_concurrency)
    async with open_client(share.target) as client:

        async def send(name: str, job: Job, outcome: Outcome) -> Outcome:
            async with gate:
                try:
                    await client.send(name, job, outcome)
                except Exception as error:
                    outcome.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
                    outcome.ended_at = time.perf_counter()
            return outcome

        warm = [
            send(f"warmup-{number}", job, Outcome(number, job.prompt_tokens, job.max_tokens))
            for number, job in share.warmups
        ]
        outcomes = await asyncio.gather(*warm)
        connection.send(Ready([outcome.error for outcome in outcomes if outcome.error]))
        start = await asyncio.to_thread(connection.recv)
        if start is None:
            return
        num_messages = 0

        async def measure(number: int, job: Job, due_at: float) -> None:
            nonlocal num_messages
            outcome = await send(str(number), job, Outcome(number, job.prompt_tokens, job.max_tokens, due_at))
            num_messages += len(outcome.message_times)
            connection.send(outcome)

        await _sleep_until(start)
        cpu, wall = time.process_time(), time.perf_counter()

        async def send_when_due() -> None:
            async with asyncio.TaskGroup() as tasks:
                for number, job, seconds in share.jobs:
                    await _sleep_until(start + seconds)
                    tasks.create_task(measure(number, job, start + seconds))

        sending = asyncio.create_task(send_when_due())
        _cancel_on_word(connection, sending)
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        connection.send(Cost(time.process_time() - cpu, time.perf_counter() - wall, num_messages))


async def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        await asyncio.sleep(left)


def _cancel_on_word(connection: Connection, task: asyncio.Task[None]) -> None:
    loop = asyncio.get_running_loop()

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            connection.recv()
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(task.cancel)

    threading.Thread(target=listen, daemon=True).start()
