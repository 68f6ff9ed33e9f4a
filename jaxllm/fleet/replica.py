"""A front end's end of a replica: what it last said of itself, what it runs, and the process if it is one of ours.

Belongs to the event loop. Routes nothing and decides nothing: `router` and `fleet_llm` do.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxllm.engine.life_cycle import EngineState
from jaxllm.errors import UserError
from jaxllm.fleet import messages, node
from jaxllm.metrics import DeviceReport, Load, Metrics


@dataclass(slots=True, kw_only=True)
class Live:
    """A request that a replica runs."""

    accepted: Any  # a `router.Routed`
    num_tokens: int  # of its prompt, and generated so far
    has_output: bool = False  # something of it was sent on: it cannot be run again


class Replica:
    """One replica."""

    def __init__(self, number: int, *, is_local: bool) -> None:
        self.number = number
        self.is_local = is_local
        self.live: dict[str, Live] = {}
        self.num_tokens = 0  # of all live requests
        self.is_drained = False  # takes no more work; ends when it has none
        self.num_starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.connected = asyncio.Event()
        self.lost = asyncio.Event()  # its connection has ended, or it could not load the model
        self.error: Exception | None = None  # why the model could not be loaded
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
        live = sum(each.accepted.num_sequences for each in self.live.values())
        running = min(self._load.running, live)
        return self._load._replace(
            running=running, waiting=live - running, waiting_tokens=self._load.waiting_tokens + self._num_new_tokens
        )

    def device_report(self) -> DeviceReport | None:
        """Say what is compiled, and the devices' memory."""
        return self._devices

    def start(self, settings: node.Settings, environment: Mapping[str, str], module: str) -> None:
        """Start a process of our own; it will connect."""
        self.lost.clear()
        self.error = None
        self.num_starts += 1
        self.heard = time.monotonic()
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

    def add(self, accepted: Any) -> None:
        """Run a request."""
        count = accepted.num_sequences * len(accepted.prompt_token_ids)
        try:
            self.send("add", accepted.internal_id, accepted.prompt, accepted.sent, accepted.options)
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"The request cannot be sent to its replica: {error}.") from error
        self.live[accepted.internal_id] = Live(accepted=accepted, num_tokens=count)
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
        """End the process, by force if it has to be."""
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()  # what it ran is lost already, and its device's memory is free only when it has gone
        await asyncio.to_thread(process.wait)


def summed(counted: list[Metrics]) -> Metrics:
    """Add counters up."""
    total = Metrics()
    for one in counted:
        for each in fields(Metrics):
            own, more = getattr(total, each.name), getattr(one, each.name)
            if isinstance(own, list):
                longest = max(len(own), len(more))
                own, more = ([*values, *[0] * (longest - len(values))] for values in (own, more))
                setattr(total, each.name, [left + right for left, right in zip(own, more, strict=True)])
            elif isinstance(own, dict):
                setattr(total, each.name, {key: own.get(key, 0) + more.get(key, 0) for key in {**own, **more}})
            else:
                setattr(total, each.name, own + more)
    return total
