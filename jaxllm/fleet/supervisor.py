"""Starts and restarts local replicas, accepts connections, detects lost replicas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from jaxllm.checks import shown
from jaxllm.errors import EngineDeadError, UnavailableError, UserError, is_exhaustion
from jaxllm.fleet import node, wire
from jaxllm.fleet.replica import Replica
from jaxllm.fleet.replica_listener import Greeting, ReplicaAddress, ReplicaListener, is_same_key, read_greeting
from jaxllm.version import __version__
from pallas_kernels.own_folders import OwnFolder

_log = logging.getLogger(__name__)
WARN_SECONDS = 1.0  # between warnings
LOOK_SECONDS = 0.25
START_SECONDS = 120.0  # to connect; importing JAX is slow
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before a restart, doubled …
WELL_SECONDS = 60.0  # … and reset after this long
MOST_FAILED_STARTS = 5  # in a row, before giving up


class Listener(Protocol):
    """Receives the events of supervised replicas."""

    def heard(self, replica: Replica, said: list[Any]) -> None: ...

    def lost(self, replica: Replica, error: Exception) -> None: ...

    def hopeless(self, error: Exception) -> None:
        """Handle the failure of all replicas."""


class End(NamedTuple):
    """Why and how a replica was lost."""

    why: str
    was_loaded: bool
    is_planned: bool


class Supervisor:
    """Supervises `replicas` from `start` to `close`."""

    def __init__(
        self,
        replicas: list[Replica],
        listener: Listener,
        settings_of: Callable[[int, str], tuple[node.Settings, Mapping[str, str]]],
        *,
        hang_timeout: float,
        module: str,
        address: ReplicaAddress | None,
    ) -> None:
        """`settings_of(number, socket path)` returns a local replica's settings and environment.

        A replica silent for `hang_timeout` seconds counts as lost.
        """
        self._replicas, self._listener, self._settings_of = replicas, listener, settings_of
        self._hang_timeout, self._module, self._address = hang_timeout, module, address
        self._folder = OwnFolder()
        self._servers: list[asyncio.Server] = []
        self.listener_from_afar: ReplicaListener | None = None
        self._warned = -WARN_SECONDS
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        path = str(self._folder.path / "socket")
        self._servers.append(await asyncio.start_unix_server(self._connected, path))
        if self._address is not None:
            self.listener_from_afar = ReplicaListener(self._address, self.connected_from_afar)
            try:
                await self.listener_from_afar.start(*node.split_address(self._address.address))
            except OSError as error:
                message = f"data_parallel_address {self._address.address}: {error.strerror}."
                raise UserError(message, "data_parallel_address") from error
        for replica in self._replicas:
            self._spawn(self.keep(replica, path) if replica.is_local else self._watch(replica))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            _log.error("supervision of a replica failed (a bug)", exc_info=task.exception())
            self._listener.hopeless(EngineDeadError("The supervision of the replicas failed; see the server's log."))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        closed = EngineDeadError("The engine was closed.")
        for replica in self._replicas:
            replica.say_last("stop")
            self._listener.lost(replica, closed)
        await asyncio.gather(*(replica.reap() for replica in self._replicas))
        for server in self._servers:
            server.close()
        if self.listener_from_afar is not None:
            await self.listener_from_afar.close()
        self._folder.remove()

    async def drain(self, replica: Replica) -> None:
        """Drain a replica until it is idle and, if local, serves again after a restart."""
        if not replica.takes_work:
            raise UnavailableError(f"Replica {replica.number} is not available (state {replica.state}).")
        if sum(each.takes_work for each in self._replicas) == 1:
            raise UnavailableError("No other replica is available; send SIGTERM to drain the whole server.")
        replica.is_drained = True
        while replica.is_drained or (replica.is_local and not replica.takes_work):
            if replica.is_given_up:
                raise UnavailableError(f"Replica {replica.number} could not be restarted; see the server's log.")
            await asyncio.sleep(LOOK_SECONDS)

    async def keep(self, replica: Replica, path: str) -> None:
        wait, num_failed = FIRST_WAIT, 0
        settings, environment = self._settings_of(replica.number, path)
        while True:
            began, is_short = time.monotonic(), False
            try:
                replica.start(settings, environment, self._module)
                end = await self.until_lost(replica)
            except OSError as error:
                end = End(f"it cannot be started: {error}", was_loaded=False, is_planned=False)
                is_short = is_exhaustion(error)
            finally:
                await replica.reap()
            if replica.error is not None and not any(each.model is not None for each in self._replicas):
                self._listener.hopeless(replica.error)
                return
            num_failed = 0 if end.was_loaded else num_failed + (not is_short)
            if num_failed == MOST_FAILED_STARTS:
                _log.error(
                    "replica %d failed to start %d times, no further attempts: %s",
                    replica.number,
                    MOST_FAILED_STARTS,
                    end.why,
                )
                replica.is_given_up = True
                if all(each.is_given_up for each in self._replicas):
                    self._listener.hopeless(EngineDeadError("All replicas failed to start; see the server's log."))
                return
            if end.is_planned:
                _log.info("replica %d is drained and will be restarted", replica.number)
                continue
            wait = FIRST_WAIT if time.monotonic() - began > WELL_SECONDS else wait
            _log.warning("replica %d is lost: %s; it will be restarted in %.1f s", replica.number, end.why, wait)
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    async def _watch(self, replica: Replica) -> None:
        while True:
            await replica.connected.wait()
            end = await self.until_lost(replica)
            _log.warning("replica %d disconnected: %s; its slot is free", replica.number, end.why)

    async def until_lost(self, replica: Replica) -> End:
        """Wait for the loss of a replica, notify the listener, and return the reason."""
        why = ""
        looked = replica.heard = time.monotonic()
        while not why:
            with suppress(TimeoutError):
                await asyncio.wait_for(replica.lost.wait(), LOOK_SECONDS)
            before, looked = looked, time.monotonic()
            # If this process was suspended, messages are unread.
            silent = looked - replica.heard if looked - before < 4 * LOOK_SECONDS else 0.0
            if replica.is_drained and not replica.live:
                why = "it is drained"
            elif replica.process is not None and replica.process.poll() is not None:
                why = f"its process exited with code {replica.process.returncode}"
            elif replica.lost.is_set():
                why = "its connection was closed" if replica.error is None else str(replica.error)
            elif silent > (self._hang_timeout if replica.connected.is_set() else START_SECONDS):
                why = f"no message for {silent:.0f} s"
            elif replica.state == "hung":
                why = "a step hangs"
        end = End(why, was_loaded=replica.model is not None, is_planned=replica.is_drained and not replica.live)
        if end.is_planned:
            replica.say_last("stop")
        self._listener.lost(replica, UnavailableError(f"The replica that ran the request is lost: {why}."))
        replica.is_drained = False
        return end

    async def connected_from_afar(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._connected(reader, writer, is_local=False)

    async def _connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_local: bool = True
    ) -> None:
        replica = None
        try:
            found = self._find(await read_greeting(reader), is_local)
            if isinstance(found, str):
                self._warn("a replica is refused: %s", found)
                writer.write(wire.frame([wire.pack(("refused", found))]))
                await writer.drain()
                return
            replica = found
            if not is_local and self.listener_from_afar is not None:
                self.listener_from_afar.admit()
            replica.connect(writer)
            said: list[Any] = []
            while replica.is_connected_by(writer):
                replica.heard = time.monotonic()
                self._listener.heard(replica, said)
                said = await wire.read_frame(reader)
        except (EOFError, OSError, TimeoutError):
            pass  # the peer disconnected, or is no replica
        except Exception as error:
            if replica is None:
                self._warn("a connection to the fleet's address is closed: %s", error)
            else:
                _log.exception("invalid message from a replica; its connection is closed")
        finally:
            writer.close()
            if replica is not None and replica.is_connected_by(writer):
                replica.lost.set()

    def _warn(self, text: str, why: object) -> None:
        """Log at most one warning a second: any peer can cause them."""
        now = time.monotonic()
        if now - self._warned >= WARN_SECONDS:
            self._warned = now
            _log.warning(text, why)

    def _find(self, greeting: Greeting, is_local: bool) -> Replica | str:
        if is_local:
            number = greeting.number
            known = number.isdecimal() and int(number) < len(self._replicas)
            return self._replicas[int(number)] if known else "its replica number is missing or invalid"
        assert self._address is not None
        if not is_same_key(greeting.key, self._address.key):
            return "its key is not the server's first --admin-api-key"
        if greeting.version != __version__:
            return f"it runs version {shown(greeting.version)}, this server version {__version__}"
        free = (each for each in self._replicas if not each.is_local and not each.connected.is_set())
        return next(free, "data_parallel_size allows no more replicas")
