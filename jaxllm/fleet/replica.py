"""The front end's view of a replica."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jaxllm.engine.life_cycle import EngineState
from jaxllm.errors import UserError
from jaxllm.fleet import node, wire
from jaxllm.metrics import DeviceReport, Load, Metrics, summed
from jaxllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """A request not validated yet."""

    request_id: str
    internal_id: str
    name: str
    prompt: Any
    prompt_token_ids: Sequence[int]
    digests: Sequence[bytes]
    params: SamplingParams  # resolved
    sent: Any  # parameters as given
    priority: int
    num_sequences: int
    replicas: Sequence[int] | None = None  # None: all
    kv_transfer_params: Mapping[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class RunningRequest:
    """A request that runs on a replica."""

    request: RoutedRequest
    num_tokens: int
    num_runs: int  # with this one
    has_output: bool = False  # delivered, so it cannot be rerouted


class Replica:
    """A replica of the fleet."""

    def __init__(self, number: int, *, is_local: bool) -> None:
        self.number = number
        self.is_local = is_local
        self.live: dict[str, RunningRequest] = {}
        self.num_tokens = 0
        self.is_drained = False  # takes no new work, ends once idle
        self.is_given_up = False
        self.num_starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.connected = asyncio.Event()
        self.lost = asyncio.Event()  # connection ended or replica failed
        self.error: Exception | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._outbox: list[bytes] = []
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._forget()
        self._before = Metrics()

    def _forget(self) -> None:
        self.model: Mapping[str, Any] | None = None
        self.heard = 0.0
        self._state: EngineState = "loading"
        self._load = Load()
        self._num_new_tokens = 0  # since the last heartbeat
        self._now = Metrics()
        self._devices: DeviceReport | None = None

    @property
    def state(self) -> EngineState:
        """The state; "loading" without a process, "draining" during a drain."""
        return "draining" if self.is_drained else self._state

    @property
    def takes_work(self) -> bool:
        return self.model is not None and self._state == "serving" and not self.is_drained and not self.lost.is_set()

    @property
    def metrics(self) -> Metrics:
        """Counts of this replica, summed over restarts."""
        return summed([self._before, self._now])

    def get_load(self) -> Load:
        """Return the load at the last heartbeat, with requests sent since."""
        live = sum(each.request.num_sequences for each in self.live.values())
        running = min(self._load.running, live)
        return self._load._replace(
            running=running, waiting=live - running, waiting_tokens=self._load.waiting_tokens + self._num_new_tokens
        )

    def device_report(self) -> DeviceReport | None:
        return self._devices

    def start(self, settings: node.Settings, environment: Mapping[str, str], module: str) -> None:
        """Start the replica's process, which then connects. Raises OSError."""
        self.lost.clear()
        self.error = None
        self.num_starts += 1
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,  # ^C reaches only the front end
        )
        given = {each.name: getattr(settings, each.name) for each in fields(settings)}
        assert self.process.stdin is not None
        self.process.stdin.write(wire.pack(given))
        self.process.stdin.close()

    def connect(self, writer: asyncio.StreamWriter) -> None:
        self.lost.clear()
        self.connected.set()
        self._writer = writer

    def is_connected_by(self, writer: asyncio.StreamWriter) -> bool:
        return self._writer is writer

    def send(self, *message: Any) -> None:
        """Queue a message; those of one iteration of the event loop are sent together."""
        packed = wire.pack(message)
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(packed)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if outbox and self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.frame(outbox))

    def say_last(self, *message: Any) -> None:
        """Send a message at once, before closing."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.frame([wire.pack(message)]))

    def add(self, request: RoutedRequest, num_runs: int = 1) -> None:
        count = request.num_sequences * len(request.prompt_token_ids)
        try:
            self.send(
                "add", request.internal_id, request.prompt, request.sent, request.priority, request.kv_transfer_params
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"The request cannot be sent to its replica: {error}.") from error
        self.live[request.internal_id] = RunningRequest(request=request, num_tokens=count, num_runs=num_runs)
        self.num_tokens += count
        self._num_new_tokens += count

    def note_output(self, name: str, count: int) -> None:
        live = self.live.get(name)
        if live is not None:
            live.has_output = True
            live.num_tokens += count
            self.num_tokens += count

    def drop(self, name: str) -> None:
        live = self.live.pop(name, None)
        if live is not None:
            self.num_tokens -= live.num_tokens

    def call(self, name: str, *given: Any) -> asyncio.Future[Any]:
        self._num_calls += 1
        answer = self._calls[self._num_calls] = asyncio.get_running_loop().create_future()
        self.send("call", self._num_calls, name, list(given))
        return answer

    def on_beat(self, state: EngineState, load: Load, metrics: Metrics) -> None:
        self._state, self._load, self._now = state, load, metrics
        self._num_new_tokens = 0

    def on_devices(self, report: DeviceReport | None) -> None:
        self._devices = report

    def on_answer(self, number: int, value: Any, error: Exception | None) -> None:
        answer = self._calls.pop(number, None)
        if answer is not None and not answer.done():
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

    def end(self, error: Exception) -> list[RunningRequest]:
        """Detach the process, fail pending calls, and return the requests, oldest first."""
        self.lost.clear()
        self.connected.clear()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._outbox = []
        calls, self._calls = self._calls, {}
        for answer in calls.values():
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # retrieved, in case the caller was cancelled
        self._before = self.metrics
        lost, self.live = [*self.live.values()], {}
        self.num_tokens = 0
        self._forget()
        return lost

    async def reap(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)
