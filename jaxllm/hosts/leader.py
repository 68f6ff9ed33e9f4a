"""The leader: assembles the group, sends each call, and notices lost, stopped or stuck processes."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.loader import load_parts
from jaxllm.errors import EngineDeadError, UserError
from jaxllm.hosts import agreement, link
from jaxllm.hosts.agreement import Offer
from jaxllm.hosts.frames import Call
from jaxllm.hosts.link import Link, RefusedError
from jaxllm.hosts.settings import HostSettings
from jaxllm.metrics import Metrics
from jaxllm.replay.recording import EventRecorder
from jaxllm.runner.compiled_programs import Key
from jaxllm.runner.model_runner import HeldStep, Runner, StepInFlight
from jaxllm.runner.results import StepOutput
from jaxllm.runner.step_input import PackedStep, StepInput
from jaxllm.scheduler.state import Plan

_log = logging.getLogger(__name__)
START_SECONDS = 600.0
CONNECT_SECONDS = 120.0  # for the first collective, in which NCCL connects
NOTE_SECONDS = 10.0  # between log lines
BEAT_SECONDS = 0.5
LOOK_SECONDS = 0.25
ENDED = "its process has ended"
MOST_STRANGERS = 16  # connections without a proof of the key
STOP_SECONDS = 5.0
FAREWELL_SECONDS = 1.0


@dataclass(slots=True)
class _Follower:
    rank: int
    link: Link
    address: str
    heard: float
    is_gone: bool = False
    busy: float = 0.0  # on `call`
    call: str = ""
    said: dict[str, list[Any]] = field(default_factory=dict)  # newest message of each kind

    def __str__(self) -> str:
        return f"host {self.rank} ({self.address})"


class Leader:
    """The leader's end of a group, for the engine's thread; another thread calls `on_failed` once.

    By default it ends the process: a thread that waits for a device cannot be interrupted.
    """

    def __init__(self, settings: HostSettings, on_failed: Callable[[BaseException], None] | None = None) -> None:
        self.settings = settings
        self.on_failed = on_failed if on_failed is not None else self._exit
        self.error: EngineDeadError | None = None
        self._followers: dict[int, _Follower] = {}
        self._changed = threading.Condition()
        self._is_complete = False
        self._is_stopping = False
        self._strangers = threading.Semaphore(MOST_STRANGERS)
        self._waits_since: float | None = None
        self._waits_for, self._waits_most = "", settings.silence
        self.dirty: set[int] = set()  # slots with parameters to send

    def make_engine(self, config: EngineConfig, progress: bool = False, metrics: Metrics | None = None) -> LLMEngine:
        """Assemble the group and load the model on every host; raise UserError, on all, if they do not agree."""
        metrics = Metrics() if metrics is None else metrics
        try:
            agreement.check(config)
            config = agreement.own_config(config, self.settings)
            self._assemble()
            self.send("go")
            agreement.start_devices(config, self.settings)
            own = agreement.offer(config)
            offers = [own, *(Offer(*each) for each in self._gather("offer"))]
            config = agreement.agreed(config, *agreement.least(offers), agreement.precompiled(config))
            self.send("agreed", config.num_kv_blocks, config.max_model_len, config.precompile)
            parts = load_parts(config, progress, metrics, {NoneType: LeadingRunner})
            runner = parts.runner
            assert isinstance(runner, LeadingRunner)
            settled = agreement.settled(runner)
            offers = [Offer(settled, 0, 0), *(Offer(shared, 0, 0) for (shared,) in self._gather("settled"))]
            agreement.least(offers)
            self.send("begin")
            with self.waiting("the first collective", CONNECT_SECONDS):
                agreement.meet(runner.setup.layout)
            runner.leader = self
            return LLMEngine(config, metrics=metrics, recorder=_Sender(self), parts=parts)
        except Exception as error:
            self._end(str(error) or type(error).__name__)
            raise

    def send(self, *message: Any) -> None:
        """Send to each follower; raise EngineDeadError if one is lost."""
        for follower in self._followers.values():
            if self.error is not None:
                raise self.error
            try:
                follower.link.send(*message)
            except ConnectionError:
                self._fail(f"{follower} is lost: {ENDED}")
            except OSError as error:
                self._fail(f"{follower} is lost: {error.strerror or error}")
        if self.error is not None:
            raise self.error

    def stop(self, why: str = "") -> None:
        """End the followers, with code 0 unless there is a reason, and wait."""
        if self.error is None and not self._is_stopping:
            self._end(why)

    @contextmanager
    def waiting(self, what: str, seconds: float | None = None) -> Iterator[None]:
        """Fail the group if the block takes longer than `seconds`, by default `silence`."""
        self._waits_for, self._waits_most = what, self.settings.silence if seconds is None else seconds
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None

    def _assemble(self) -> None:
        settings = self.settings
        noted = time.monotonic()
        end = noted + START_SECONDS
        with self._listener(end) as listener:
            listener.settimeout(LOOK_SECONDS)
            _log.info("host 0 of %d waits for the others at %s", settings.num_hosts, settings.coordinator)
            while len(self._followers) < settings.num_hosts - 1:
                with suppress(TimeoutError):
                    peer, address = listener.accept()
                    if self._strangers.acquire(blocking=False):
                        threading.Thread(target=self._greet, args=(peer, str(address[0])), daemon=True).start()
                    else:
                        peer.close()
                now = time.monotonic()
                missing = sorted({*range(1, settings.num_hosts)} - self._followers.keys())
                if now > end:
                    raise UserError(
                        f"hosts {missing} did not connect to {settings.coordinator} in {START_SECONDS:g} s; start "
                        "them, or check the network.",
                        "coordinator",
                    )
                if missing and now - noted > NOTE_SECONDS:
                    noted = now
                    _log.info("host 0 waits for hosts %s", missing)
        with self._changed:
            self._is_complete = True
        now = time.monotonic()
        for follower in self._followers.values():
            follower.heard = now
            threading.Thread(target=self._listen, args=(follower,), name="jaxllm-host", daemon=True).start()
        threading.Thread(target=self._watch, name="jaxllm-hosts", daemon=True).start()

    def _listener(self, end: float) -> socket.socket:
        settings = self.settings
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        while True:
            try:
                return socket.create_server((settings.host, settings.port), family=family)
            except OSError as error:
                if isinstance(error, socket.gaierror) and time.monotonic() < end:  # the name may come
                    time.sleep(1.0)
                    continue
                raise UserError(
                    f"coordinator {settings.coordinator}: host 0 cannot listen there: {error.strerror or error}. Give "
                    "an address of this machine and two free ports.",
                    "coordinator",
                ) from error

    def _greet(self, peer: socket.socket, address: str) -> None:
        connection = Link(peer)
        try:
            rank = link.accept(connection, self.settings.key, self.settings.num_hosts)
            connection.greeted(self.settings.silence)
        except (RefusedError, EOFError, OSError, ValueError, TypeError) as error:
            _log.warning("a connection from %s is refused: %s", address, error)
            connection.close()
            return
        finally:
            self._strangers.release()
        with self._changed:
            if self._is_complete:
                connection.close()
                return
            before = self._followers.get(rank)
            self._followers[rank] = _Follower(rank, connection, address, time.monotonic())
        if before is not None:  # restarted
            before.link.try_send("refused", f"another process has connected as rank {rank}")
            before.link.close()
        _log.info("host %d has connected from %s", rank, address)

    def _listen(self, follower: _Follower) -> None:
        why = ENDED
        try:
            while True:
                name, *given = follower.link.receive()
                follower.heard = time.monotonic()
                if name == "beat":
                    follower.busy, follower.call = float(given[0]), str(given[1])
                elif name == "failed":
                    self._fail(f"{follower} failed: {given[0]}")
                elif name == "refuses":
                    self._fail(f"{follower}: {given[0]}", UserError(f"host {follower.rank}: {given[0]}"))
                else:
                    with self._changed:
                        follower.said[str(name)] = given
                        self._changed.notify_all()
        except (EOFError, ConnectionError):
            pass
        except Exception as error:
            why = f"it sent what is no message ({error})"
        follower.is_gone = True
        if not self._is_stopping:
            self._fail(f"{follower} is lost: {why}")
        with self._changed:
            self._changed.notify_all()

    def _watch(self) -> None:
        silence, beaten, looked = self.settings.silence, 0.0, time.monotonic()
        while self.error is None and not self._is_stopping:
            time.sleep(LOOK_SECONDS)
            before, looked = looked, time.monotonic()
            if looked - beaten > BEAT_SECONDS:
                beaten = looked
                for follower in self._followers.values():
                    follower.link.try_send(Call.BEAT)
            if looked - before > 8 * LOOK_SECONDS:  # suspended: messages are unread
                for follower in self._followers.values():
                    follower.heard = looked
                continue
            since = self._waits_since
            for follower in self._followers.values():
                if looked - follower.heard > silence:
                    self._fail(f"{follower} is lost: no message for {looked - follower.heard:.0f} s")
                elif follower.busy > silence and follower.call:
                    self._fail(f"{follower} is stuck: {follower.call} takes {follower.busy:.0f} s")
            if since is not None and looked - since > self._waits_most:
                followers = self._followers.values()
                late = [f"{each} works on {each.call}" for each in followers if each.busy > silence / 2]
                late += [
                    f"no message for {looked - each.heard:.0f} s from {each}"
                    for each in followers
                    if looked - each.heard > silence / 2
                ]
                self._fail(
                    f"{self._waits_for} takes {looked - since:.0f} s on host 0; {'; '.join(late) or 'others wait'}"
                )

    def _gather(self, name: str) -> list[list[Any]]:
        """Wait for a message of each follower; return their fields by rank."""

        def is_over() -> bool:
            return self.error is not None or all(name in each.said for each in self._followers.values())

        with self._changed:
            self._changed.wait_for(is_over)
        if self.error is not None:
            raise self.error.__cause__ or self.error
        return [self._followers[rank].said.pop(name) for rank in sorted(self._followers)]

    def _fail(self, why: str, cause: Exception | None = None) -> None:
        with self._changed:
            if self.error is not None or self._is_stopping:
                return
            error = EngineDeadError(
                f"The group of {self.settings.num_hosts} hosts has stopped: {why.removesuffix('.')}."
            )
            error.__cause__ = cause
            self.error = error
            self._changed.notify_all()
        _log.error("%s", error)
        for follower in self._followers.values():
            follower.link.try_send(Call.STOP, why)
        if cause is None:  # `_gather` raises refusals
            self.on_failed(error)

    def _exit(self, error: BaseException) -> None:
        time.sleep(FAREWELL_SECONDS)
        os._exit(1)

    def _end(self, why: str) -> None:
        self._is_stopping = True
        for follower in self._followers.values():
            if why:
                follower.link.try_send(Call.STOP, why)
            else:
                with suppress(OSError):
                    follower.link.send(Call.STOP, why)
        # JAX's service, in this process, would end them with a stack trace.
        if self._is_complete:
            with self._changed:
                self._changed.wait_for(lambda: all(each.is_gone for each in self._followers.values()), STOP_SECONDS)


class _Sender(EventRecorder):
    """Sends the scheduler's calls."""

    def __init__(self, leader: Leader) -> None:
        super().__init__()
        self._leader = leader

    @property
    def is_on(self) -> bool:
        return self._leader.error is None

    def planned(self, plan: Plan) -> None:
        self._leader.dirty.update(admission.slot for admission in plan.admitted)
        super().planned(plan)

    def write(self, entry: list[Any]) -> None:
        self._leader.send(*entry)

    def close(self) -> None:
        self._leader.stop()


class _Watched(NamedTuple):
    """A dispatched step that is awaited with a time limit."""

    flight: StepInFlight
    leader: Leader

    def result(self) -> StepOutput:
        with self.leader.waiting(f"step {self.flight.plan.number}"):
            return self.flight.result()


class LeadingRunner(Runner):
    """Sends each step's inputs to the followers, then runs it."""

    leader: Leader | None = None

    @cached_property
    def _places(self) -> Mapping[Key, int]:
        return {key: index for index, key in enumerate(agreement.keys_of(self))}

    def pack(self, given: StepInput) -> PackedStep:
        packed = super().pack(given)
        leader = self.leader
        assert leader is not None
        rows = [[slot, given.sampling[slot].tobytes()] for slot in sorted(leader.dirty)]
        places = self._places
        leader.send(
            Call.STEP,
            packed.plan.number,
            [places[key] for key in packed.way],
            zlib.crc32(packed.buffer.data),
            rows,
            [[slot, extras.tobytes()] for slot, extras in packed.extras],
            [list(map(int, each)) for each in given.tokens],
            [[one.sequence_id, one.position, one.index, one.token, one.is_whole] for one in packed.scored],
        )
        leader.dirty.clear()
        return packed

    def run(self, packed: PackedStep) -> Any:
        assert self.leader is not None
        with self.leader.waiting(f"step {packed.plan.number}"):
            return self._watched(super().run(packed))

    def sample(self, held: HeldStep, masks: np.ndarray | None = None, is_masked: np.ndarray | None = None) -> Any:
        assert self.leader is not None
        rows = [] if masks is None or is_masked is None else np.flatnonzero(is_masked).tolist()
        self.leader.send(
            Call.SAMPLE, held.plan.number, rows, masks[rows].tobytes() if rows and masks is not None else b""
        )
        with self.leader.waiting(f"step {held.plan.number}"):
            return self._watched(super().sample(held, masks, is_masked))

    def renew(self) -> None:
        if self.leader is not None:
            self.leader.send(Call.RENEW)
        super().renew()

    def close(self) -> None:
        if self.leader is None or self.leader.error is None:  # else steps may never end
            super().close()

    def _watched(self, started: StepInFlight | HeldStep) -> Any:
        assert self.leader is not None
        return started if isinstance(started, HeldStep) else _Watched(started, self.leader)
