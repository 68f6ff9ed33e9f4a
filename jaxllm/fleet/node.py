"""The replica process: runs one engine and serves a front end, over one connection with which it ends.

A front end starts `python -m jaxllm.fleet.node`, with settings on standard input; on another machine it is `jaxllm
serve --headless`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import ssl
import sys
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, fields
from typing import Any

from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.errors import EngineError, RequestFailedError, UserError
from jaxllm.fleet import wire
from jaxllm.fleet.replica_listener import Greeting
from jaxllm.log_lines import LineFormatter
from jaxllm.metrics import StepReport
from jaxllm.outputs import FinishReason, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.version import __version__

_log = logging.getLogger(__name__)
BEAT_SECONDS = 0.25  # between heartbeats
NO_BOUND = 1 << 40  # the front end bounds the queue
SECOND_SIGNAL = 130  # as in shells
_LOCAL = ("tokenizer",)  # of `ModelInfo`, read from disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A node's settings."""

    engine: Mapping[str, Any]
    address: str  # of the front end: HOST:PORT, or a Unix socket's path
    number: int | None = None  # of a local replica
    key: str = ""
    ca: str | None = None
    observes: bool = False  # for observers
    cores: tuple[int, ...] = ()
    hang_timeout: float = 8.0
    log_level: int = logging.WARNING


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port[:9]) < 65536:
        raise UserError(f"data_parallel_address must be HOST:PORT, got {address!r:.80}.", "data_parallel_address")
    return host.strip("[]"), int(port)


async def run(settings: Settings, engine: AsyncLLM | None = None) -> bool:
    """Load the engine, unless given, and serve the front end; return whether it sent "stop".

    Raises UserError if the front end refuses this replica.
    """
    if engine is None:
        bounds: dict[str, Any] = {"max_queued_requests": NO_BOUND, "max_queued_tokens": NO_BOUND}
        engine = AsyncLLM(**settings.engine, **bounds, hang_timeout=settings.hang_timeout)
    reader, writer = await _connect(settings)
    node = Node(engine, reader, writer)
    if settings.observes:
        engine.add_observer(node)
    if settings.number is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, node.leave)
    try:
        return await node.run(settings)
    finally:
        writer.close()
        await engine.close(1.0)


async def _connect(settings: Settings) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if settings.number is not None:
        return await asyncio.open_unix_connection(settings.address)
    tls = None if settings.ca is None else ssl.create_default_context(cafile=settings.ca)
    try:
        return await asyncio.open_connection(*split_address(settings.address), ssl=tls)
    except OSError as error:
        message = f"data_parallel_address {settings.address}: {error.strerror or error}."
        raise UserError(message, "data_parallel_address") from error


class Node:
    """A connection to a front end, and an `Observer` of the engine."""

    def __init__(self, engine: AsyncLLM, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._engine = engine
        self._reader, self._writer = reader, writer
        self._outbox: list[bytes] = []
        self._has_outputs = False
        self._changed = asyncio.Event()
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_leaving = False

    async def run(self, settings: Settings) -> bool:
        """Serve until "stop" or the connection's end; return whether "stop" arrived."""
        number = "" if settings.number is None else str(settings.number)
        self._writer.write(Greeting(__version__, number, settings.key.encode()).pack())
        tasks = [asyncio.ensure_future(work()) for work in (self._write, self._beat, self._start)]
        try:
            while True:
                for name, *given in await wire.read_frame(self._reader):
                    if name == "stop":
                        return True
                    if name == "refused":
                        (why,) = given
                        raise UserError(f"the server at {settings.address} refuses this replica: {why}.")
                    getattr(self, f"_on_{name}")(*given)
        except (EOFError, OSError):
            return False
        finally:
            for task in (*tasks, *self._requests.values(), *self._tasks):
                task.cancel()

    def leave(self) -> None:
        """Request a drain, then "stop" once idle. A second call exits immediately."""
        if self._is_leaving:
            os._exit(SECOND_SIGNAL)
        self._is_leaving = True
        _log.info("stopping once %d running requests are answered", len(self._requests))
        self._say("leave")

    def _say(self, *message: Any) -> None:
        self._outbox.append(wire.pack(message))
        self._has_outputs |= message[0] == "output"
        self._changed.set()

    async def _write(self) -> None:
        while True:
            await self._changed.wait()
            if self._has_outputs:
                self._say(*self._condition())
            outbox, self._outbox, self._has_outputs = self._outbox, [], False
            self._changed.clear()
            self._writer.write(wire.frame(outbox))
            await self._writer.drain()

    def _condition(self) -> tuple[Any, ...]:
        engine = self._engine
        return "beat", engine.state, engine.get_load(), engine.metrics

    async def _beat(self) -> None:
        while True:
            self._say(*self._condition())
            self._say("devices", self._engine.device_report())
            await asyncio.sleep(BEAT_SECONDS)

    async def _start(self) -> None:
        engine = self._engine
        try:
            await engine.start()
        except Exception as error:
            self._say("failed", error)
            return
        known = {each.name: getattr(engine.model, each.name) for each in fields(engine.model)}
        self._say(*self._condition())  # for routing at once
        self._say("ready", {name: own for name, own in known.items() if name not in _LOCAL})
        if engine.config.enable_kv_cache_events:
            with contextlib.suppress(EngineError):
                async for batch in engine.kv_events():
                    self._say("blocks", batch.events)

    def _on_add(self, name: str, prompt: Any, params: Any, priority: int, transfer: Any) -> None:
        self._requests[name] = asyncio.ensure_future(self._generate(name, prompt, params, priority, transfer))

    async def _generate(self, name: str, prompt: Any, params: Any, priority: int, transfer: Any) -> None:
        outputs = self._engine.generate(prompt, params, name, priority=priority, kv_transfer_params=transfer)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    self._say("output", name, output)
        except Exception as error:  # affects only this request
            self._say("error", name, _own(error))
        finally:
            self._requests.pop(name, None)

    def _on_abort(self, name: str, reason: FinishReason) -> None:
        self._engine.end(name, reason)

    def _on_forget(self, name: str) -> None:
        """Cancel a dropped request and send nothing."""
        task = self._requests.pop(name, None)
        if task is not None:
            task.cancel()

    def _on_call(self, number: int, name: str, given: list[Any]) -> None:
        call = self._check(*given) if name == "check" else getattr(self._engine, name)(*given)
        task = asyncio.ensure_future(self._answer(number, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _check(self, request_id: str, prompt: Any, params: Any, priority: int) -> None:
        self._engine.engine.accept(request_id, prompt, params, priority)

    async def _answer(self, number: int, call: Any) -> None:
        try:
            value = await call
            self._say(*self._condition())
            self._say("answer", number, value, None)
        except Exception as error:
            self._say("answer", number, None, _own(error))

    def step(self, report: StepReport) -> None:
        self._say("step", report)

    def tokens(self, seconds: float, count: int, is_first: bool) -> None:
        self._say("tokens", seconds, count, is_first)

    def finished(self, output: RequestOutput, params: SamplingParams) -> None:
        self._say("finished", output, params)


def _own(error: Exception) -> Exception:
    if isinstance(error, UserError | EngineError):
        return error
    _log.error("a request failed", exc_info=error)
    return RequestFailedError("The request failed in its replica, whose log has the reason; other requests continue.")


def main() -> int:
    settings = Settings(**wire.unpack(sys.stdin.buffer.read()))
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(f"%(asctime)s %(levelname)s replica {settings.number} %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("jaxllm").setLevel(settings.log_level)
    if settings.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, settings.cores)  # libraries count them
    asyncio.run(run(settings))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a hanging step must not keep the process alive
