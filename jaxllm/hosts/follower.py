"""A follower: a replay of the leader's calls, with a device."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import zlib
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm.hosts import agreement, link
from jaxllm.hosts.frames import Call
from jaxllm.hosts.leader import BEAT_SECONDS, LOOK_SECONDS, START_SECONDS
from jaxllm.hosts.link import Link, RefusedError
from jaxllm.hosts.settings import HostSettings
from jaxllm.metrics import Metrics
from jaxllm.replay.recording import Kind
from jaxllm.replay.replay import Replayer
from jaxllm.runner.model_runner import HeldStep, Runner, StepInFlight
from jaxllm.runner.results import Scored
from jaxllm.runner.step_input import StepInput
from jaxllm.sampling.sampler import ROW_WIDTH
from jaxllm.scheduler.state import Plan
from jaxllm.setup.model_setup import prepare

_log = logging.getLogger(__name__)
RETRY_SECONDS = 0.5
FAREWELL_SECONDS = 0.5  # for the leader to read a last message
SECOND_SIGNAL = 130  # as in shells


class DivergedError(Exception):
    """This process computed something else than the leader."""


class Steps:
    """Repeats the leader's calls on this process's devices."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._replayer = Replayer(runner.limits)
        self._keys = agreement.keys_of(runner)
        self._sampling = np.zeros((runner.geometry.num_slots, ROW_WIDTH), np.int32)
        self._flights: dict[int, StepInFlight | HeldStep] = {}
        self._num_calls = 0

    def take(self, message: list[Any]) -> None:
        """Repeat a call; raise DivergedError if a plan, batch or token differs."""
        name = message[0]
        if name == Call.STEP:
            self._dispatch(*message[1:])
        elif name == Call.SAMPLE:
            self._sample(*message[1:])
        elif name == Call.RENEW:
            self._flights.clear()
            self._runner.renew()
        else:
            self._take_event(message)

    def _take_event(self, entry: list[Any]) -> None:
        kind = Kind(entry[0])
        if kind is Kind.COMMIT:
            self._compare(entry)
        if kind is Kind.RESET:
            self._flights.clear()
        self._num_calls += 1
        moment = self._replayer.take(entry, self._num_calls)
        if moment.difference is not None:
            raise DivergedError(moment.difference.replace("recorded", "the leader has"))

    def _compare(self, entry: list[Any]) -> None:
        """Raise DivergedError if a step's tokens differ from the leader's."""
        _, _, number, known, failed, lengths, _ = entry
        plan, flight = self._replayer.plans[number], self._flights.pop(number)
        for older in [older for older in self._flights if older < number]:
            del self._flights[older]
        assert isinstance(flight, StepInFlight)
        result = flight.result()
        num_rows = len(plan.slots)
        leaders = np.frombuffer(known, np.int32).reshape(num_rows, -1)
        own = (result.tokens.T * plan.samples).T.reshape(num_rows, -1)
        width = min(leaders.shape[1], own.shape[1])  # a grammar may add forced tokens
        counts = np.ones(num_rows, np.int32) if lengths is None else np.frombuffer(lengths, np.int32)
        is_kept = np.arange(width) < counts[:, None]
        is_finite = np.ones(num_rows, np.bool_)
        is_finite[failed or []] = False
        differs = ((leaders[:, :width] != own[:, :width]) & is_kept & is_finite[:, None]).any(axis=1)
        differs |= (is_finite != result.is_finite) & plan.samples
        if differs.any():
            row = int(np.flatnonzero(differs)[0])
            raise DivergedError(
                f"step {number}, row {row}: the leader sampled {leaders[row].tolist()}, checksum "
                f"{zlib.crc32(known):08x}, and this host {own[row].tolist()}, {zlib.crc32(own.tobytes()):08x}"
            )

    def _dispatch(
        self,
        number: int,
        way: list[int],
        checksum: int,
        rows: list[Any],
        extras: list[Any],
        tokens: list[Any],
        scored: list[Any],
    ) -> None:
        plan = self._replayer.plans[number]
        for slot, row in rows:
            self._sampling[slot] = np.frombuffer(row, np.int32)
        given = StepInput(plan, self._sampling)
        given.chunks = self._chunks(plan)
        given.tokens = [(slot, position, token) for slot, position, token in tokens]
        given.extras = [(slot, np.frombuffer(packed, np.int32)) for slot, packed in extras]
        if scored:
            given.side["scored"] = [Scored(*each) for each in scored]
        packed = self._runner.pack_for(tuple(self._keys[index] for index in way), given)
        own = zlib.crc32(packed.buffer.data)
        if own != checksum:
            raise DivergedError(
                f"step {number}: the leader's batch has the checksum {checksum:08x}, this host's {own:08x}"
            )
        self._flights[number] = self._runner.run(packed)

    def _chunks(self, plan: Plan) -> list[np.ndarray]:
        first, running, chunks = plan.num_decodes, self._replayer.core.state.running, []
        for slot, start, length in zip(
            plan.slots[first:].tolist(), plan.starts[first:].tolist(), plan.lengths[first:].tolist(), strict=True
        ):
            record = running[slot]
            assert record is not None
            chunks.append(np.asarray(record.request.tokens[start : start + length], np.int32))
        return chunks

    def _sample(self, number: int, rows: list[int], words: bytes) -> None:
        held = self._flights[number]
        assert isinstance(held, HeldStep)
        masks = is_masked = None
        if rows:
            given = np.frombuffer(words, np.int32).reshape(len(rows), -1)
            is_masked = np.zeros(len(held.plan.slots), np.bool_)
            masks = np.zeros((len(is_masked), given.shape[1]), np.int32)
            is_masked[rows], masks[rows] = True, given
        self._flights[number] = self._runner.sample(held, masks, is_masked)


class Follower:
    """A follower's process: connects, agrees, loads, and repeats calls until the leader stops it."""

    def __init__(self, settings: HostSettings) -> None:
        self.settings = settings
        self.link: Link | None = None
        self._inbox: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._heard = 0.0
        self._call, self._since = "", 0.0
        self._is_awaiting = self._is_leaving = False

    def run(self, config: EngineConfig) -> int:
        """Follow until the leader ends the group, and return 0; raise UserError without agreement.

        After a failure the process ends with code 1: a thread that waits for a device cannot be interrupted.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        config = agreement.own_config(config, self.settings)
        self.link = connection = self._connect()
        self._heard = time.monotonic()
        for work in (self._listen, self._beat):
            threading.Thread(target=work, name="jaxllm-hosts", daemon=True).start()
        try:
            runner = self._load(config, connection)
        except UserError as error:
            self._is_awaiting = True  # for its own error message
            connection.try_send("refuses", str(error))
            time.sleep(FAREWELL_SECONDS)
            raise
        except Exception as error:
            _log.exception("the model could not be loaded")
            self._leave(f"{type(error).__name__}: {error}")
        _log.info("host %d of %d follows %s", self.settings.rank, self.settings.num_hosts, self.settings.coordinator)
        return self._follow(Steps(runner), runner)

    def _load(self, config: EngineConfig, connection: Link) -> Runner:
        self._await("go")
        agreement.start_devices(config, self.settings)
        connection.send("offer", *agreement.offer(config).packed())
        num_blocks, max_model_len, precompile = self._await("agreed")
        config = agreement.agreed(config, num_blocks, max_model_len, precompile)
        runner = Runner(config, prepare(config), Metrics())
        connection.send("settled", agreement.settled(runner))
        self._await("begin")
        agreement.meet(runner.setup.layout)
        return runner

    def _follow(self, steps: Steps, runner: Runner) -> int:
        last = ""
        while True:
            message = self._inbox.get()
            if message[0] == Call.STOP:
                runner.close()
                return 0
            if message[0] in (Call.STEP, Call.SAMPLE):
                last = f"step {message[1]}"
            self._since, self._call = time.monotonic(), last or "a call"
            try:
                steps.take(message)
            except DivergedError as error:
                self._leave(f"it diverged: {error}")
            except Exception as error:
                _log.exception("a call of the leader failed")
                self._leave(f"{type(error).__name__} in {last or 'a call'}: {error}")
            self._call = ""

    def _connect(self) -> Link:
        settings, end = self.settings, time.monotonic() + START_SECONDS
        _log.info("host %d of %d connects to %s", settings.rank, settings.num_hosts, settings.coordinator)
        while True:
            try:
                connection = Link(socket.create_connection((settings.host, settings.port), link.GREETING_SECONDS))
                link.greet(connection, settings.key, settings.rank, settings.num_hosts)
                connection.greeted(settings.silence)
                return connection
            except RefusedError as error:
                message = f"host 0 at {settings.coordinator} refuses this process: {error}."
                raise UserError(message, "coordinator") from error
            except (OSError, EOFError, ValueError) as error:  # it does not listen yet
                if time.monotonic() > end:
                    message = f"coordinator {settings.coordinator} cannot be reached: {error}."
                    raise UserError(message, "coordinator") from error
                time.sleep(RETRY_SECONDS)

    def _await(self, name: str) -> list[Any]:
        self._is_awaiting = True
        message = self._inbox.get()
        self._is_awaiting = False
        if message[0] == "refused":
            raise UserError(f"host 0 refuses this process: {message[1]}.")
        if message[0] == Call.STOP:
            raise UserError(f"host 0 ended the group: {message[1] or 'it was stopped'}")
        if message[0] != name:
            raise RuntimeError(f"{name!r} was expected of the leader, not {message[0]!r}")
        return message[1:]

    def _listen(self) -> None:
        assert self.link is not None
        why = "the connection was closed"
        try:
            while True:
                message = self.link.receive()
                self._heard = time.monotonic()
                if message[0] == Call.BEAT:
                    continue
                if message[0] == Call.STOP and message[1] and not self._is_awaiting:
                    self._leave(f"host 0 ended the group: {message[1]}", farewell=False)  # a step may never end
                self._inbox.put(message)
                if message[0] in (Call.STOP, "refused"):
                    return
        except (EOFError, ConnectionError):
            pass
        except Exception as error:
            why = str(error)
        self._leave(f"host 0 is lost: {why}", farewell=False)  # at once: JAX ends this process too, with a stack trace

    def _beat(self) -> None:
        assert self.link is not None
        beaten, looked = 0.0, time.monotonic()
        while True:
            time.sleep(LOOK_SECONDS)
            before, looked = looked, time.monotonic()
            if looked - beaten > BEAT_SECONDS:
                beaten = looked
                call = self._call
                self.link.try_send("beat", looked - self._since if call else 0.0, call)
            if looked - before > 8 * LOOK_SECONDS:
                self._heard = looked
            elif looked - self._heard > self.settings.silence:
                self._leave(f"host 0 is lost: no message for {looked - self._heard:.0f} s")

    def _leave(self, why: str, farewell: bool = True) -> NoReturn:
        """Report a failure and end the process."""
        _log.error("host %d stops: %s", self.settings.rank, why)
        if self.link is not None and farewell:
            self.link.try_send("failed", why)
            time.sleep(FAREWELL_SECONDS)
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(1)

    def _on_signal(self, number: int, _: object) -> None:
        if self._is_leaving or self.link is None:
            os._exit(SECOND_SIGNAL if self._is_leaving else 0)
        self._is_leaving = True
        _log.info(
            "%s: host %d ends with host 0, which drains; a second signal ends it at once",
            signal.Signals(number).name,
            self.settings.rank,
        )
