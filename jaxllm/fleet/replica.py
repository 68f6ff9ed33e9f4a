"""A front end's end of a replica: what it last said of itself, what it runs, and the process if it is of this machine.

Belongs to the event loop. Routes nothing and decides nothing: `router` and `supervisor` do.
"""

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
from jaxllm.fleet import messages, node
from jaxllm.metrics import DeviceReport, Load, Metrics, summed
from jaxllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A request on its way to a replica, which will check it."""

    request_id: str  # the caller's
    internal_id: str  # the fleet's
    name: str  # for logs
    prompt: Any
    prompt_token_ids: Sequence[int]
    digests: Sequence[bytes]  # of the prompt's full blocks
    params: SamplingParams  # by which outputs are merged
    sent: Any  # the parameters as they were given
    priority: int
    num_sequences: int


@dataclass(slots=True, kw_only=True)
class Live:
    """A request that a replica runs."""

    request: Routed
    num_tokens: int  # of its prompt, and generated so far
    num_runs: int  # replicas that have had it, this one included
    has_output: bool = False  # something of it was sent on: it cannot be run again


class Replica:
    """One replica."""

    def __init__(self, number: int, *, is_local: bool) -> None:
        self.number = number
        self.is_local = is_local
        self.live: dict[str, Live] = {}
        self.num_tokens = 0  # of all live requests
        self.is_drained = False  # takes no more work; ends when it has none
        self.is_given_up = False  # it could not be started time after time
        self.num_starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.connected = asyncio.Event()
        self.lost = asyncio.Event()  # its connection has ended, or it is of no use
        self.error: Exception | None = None  # why it is of no use
        self._writer: asyncio.StreamWriter | None = None
        self._outbox: list[bytes] = []
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._forget()
        self._before = Metrics()  # of the processes before this one

    def _forget(self) -> None:
        self.model: Mapping[str, Any] | None = None  # the fields of its `ModelInfo`, once it is loaded
        self.heard = 0.0  # when it last said anything
        self._state: EngineState = "loading"
        self._load = Load()
        self._num_new_tokens = 0  # of prompts that were sent since its last word
        self._now = Metrics()
        self._devices: DeviceReport | None = None

    @property
    def state(self) -> EngineState:
        """What it does; "loading" while there is no process."""
        return "draining" if self.is_drained else self._state

    @property
    def takes_work(self) -> bool:
        """Whether requests may be sent to it."""
        return self.model is not None and self._state == "serving" and not self.is_drained and not self.lost.is_set()

    @property
    def metrics(self) -> Metrics:
        """What it has counted, in all of its processes."""
        return summed([self._before, self._now])

    def get_load(self) -> Load:
        """Say how busy it is."""
        live = sum(each.request.num_sequences for each in self.live.values())
        running = min(self._load.running, live)
        return self._load._replace(
            running=running, waiting=live - running, waiting_tokens=self._load.waiting_tokens + self._num_new_tokens
        )

    def device_report(self) -> DeviceReport | None:
        """Say what is compiled, and the devices' memory."""
        return self._devices

    def start(self, settings: node.Settings, environment: Mapping[str, str], module: str) -> None:
        """Start a process, which will connect; OSError where that cannot be done."""
        self.lost.clear()
        self.error = None
        self.num_starts += 1
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,  # ^C is for the front end, which drains
        )
        given = {each.name: getattr(settings, each.name) for each in fields(settings)}
        assert self.process.stdin is not None
        self.process.stdin.write(messages.pack(given))
        self.process.stdin.close()

    def connect(self, writer: asyncio.StreamWriter) -> None:
        """Take the connection of a process."""
        self.lost.clear()
        self.connected.set()
        self._writer = writer

    def is_connected_by(self, writer: asyncio.StreamWriter) -> bool:
        """Whether a connection is its own; what comes over an earlier one means nothing any more."""
        return self._writer is writer

    def send(self, *message: Any) -> None:
        """Send a message, with all others of this turn of the event loop in one frame."""
        packed = messages.pack(message)
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(packed)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if outbox and self._writer is not None and not self._writer.is_closing():
            self._writer.write(messages.frame(outbox))

    def say_last(self, *message: Any) -> None:
        """Send a message now, before the connection is closed."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(messages.frame([messages.pack(message)]))

    def add(self, request: Routed, num_runs: int = 1) -> None:
        """Run a request; UserError if it holds what cannot be sent."""
        count = request.num_sequences * len(request.prompt_token_ids)
        try:
            self.send("add", request.internal_id, request.prompt, request.sent, request.priority)
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"The request cannot be sent to its replica: {error}.") from error
        self.live[request.internal_id] = Live(request=request, num_tokens=count, num_runs=num_runs)
        self.num_tokens += count
        self._num_new_tokens += count

    def note_output(self, name: str, count: int) -> None:
        """Take note of a request's new tokens."""
        live = self.live.get(name)
        if live is not None:
            live.has_output = True
            live.num_tokens += count
            self.num_tokens += count

    def drop(self, name: str) -> None:
        """Forget a request."""
        live = self.live.pop(name, None)
        if live is not None:
            self.num_tokens -= live.num_tokens

    def call(self, name: str, *given: Any) -> asyncio.Future[Any]:
        """Call a method of its engine."""
        self._num_calls += 1
        answer = self._calls[self._num_calls] = asyncio.get_running_loop().create_future()
        self.send("call", self._num_calls, name, list(given))
        return answer

    # What it says.

    def on_beat(self, state: EngineState, load: Load, metrics: Metrics) -> None:
        """Take note of how it is."""
        self._state, self._load, self._now = state, load, metrics
        self._num_new_tokens = 0

    def on_devices(self, report: DeviceReport | None) -> None:
        """Take note of its devices."""
        self._devices = report

    def on_answer(self, number: int, value: Any, error: Exception | None) -> None:
        """Hand over what a call has returned."""
        answer = self._calls.pop(number, None)
        if answer is not None and not answer.done():
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

    def end(self, error: Exception) -> list[Live]:
        """Be without a process; return what it ran, the oldest first."""
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
                answer.exception()  # its caller may have gone
        self._before = self.metrics
        lost, self.live = [*self.live.values()], {}
        self.num_tokens = 0
        self._forget()
        return lost

    async def reap(self) -> None:
        """Kill the process: what it ran is lost already, and its device's memory is free only when it has gone."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)
