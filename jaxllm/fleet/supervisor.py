"""Keeps a fleet's replicas alive: starts those of this machine, takes the connections of all, finds out which are lost.

Belongs to the event loop. Knows connections and processes; what replicas say, and what they run, is its listener's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from jaxllm.checks import shown
from jaxllm.errors import EngineDeadError, UnavailableError, UserError, is_exhaustion
from jaxllm.fleet import messages, node
from jaxllm.fleet.door import Door, DoorListener, Greeting, is_same_key, read_greeting
from jaxllm.fleet.replica import Replica
from jaxllm.version import __version__
from pallas_kernels.own_folders import OwnFolder

_log = logging.getLogger(__name__)
WARN_SECONDS = 1.0  # between two warnings about strangers
LOOK_SECONDS = 0.25  # between two looks at a replica
START_SECONDS = 120.0  # that a process has to connect: it imports JAX first
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before a replica is started again; doubled each time …
WELL_SECONDS = 60.0  # … unless it has served for so long
MOST_FAILED_STARTS = 5  # in a row; then the replica is given up


class Listener(Protocol):
    """Who has replicas supervised."""

    def heard(self, replica: Replica, said: list[Any]) -> None:
        """Take in a frame."""

    def lost(self, replica: Replica, error: Exception) -> None:
        """Do without a replica, which has ended or is about to."""

    def hopeless(self, error: Exception) -> None:
        """Do without any: none can be started."""


class End(NamedTuple):
    """How a replica was lost."""

    why: str
    was_loaded: bool  # it had loaded the model
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
        door: Door | None,
    ) -> None:
        """`settings_of` describes a replica of this machine, with its environment, by its number and the socket's path.

        `module` is what its process runs. A replica that says nothing for `hang_timeout` seconds is lost.
        """
        self._replicas, self._listener, self._settings_of = replicas, listener, settings_of
        self._hang_timeout, self._module, self._door = hang_timeout, module, door
        self._folder = OwnFolder()
        self._servers: list[asyncio.Server] = []
        self.listener_from_afar: DoorListener | None = None
        self._warned = -WARN_SECONDS
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        """Listen, and start the replicas of this machine; an address that cannot be had is a UserError."""
        path = str(self._folder.path / "socket")
        self._servers.append(await asyncio.start_unix_server(self._connected, path))
        if self._door is not None:
            self.listener_from_afar = DoorListener(self._door, self.connected_from_afar)
            try:
                await self.listener_from_afar.start(*node.split_address(self._door.address))
            except OSError as error:
                message = f"data_parallel_address {self._door.address}: {error.strerror}."
                raise UserError(message, "data_parallel_address") from error
        for replica in self._replicas:
            self._spawn(self.keep(replica, path) if replica.is_local else self._watch(replica))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Make known that a replica is watched no more, through a mistake of ours."""
        if not task.cancelled() and task.exception() is not None:
            _log.error("a replica is not supervised any more", exc_info=task.exception())
            self._listener.hopeless(EngineDeadError("The fleet's supervision has failed."))

    async def close(self) -> None:
        """End the replicas."""
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
        """Give a replica no more work; return when it has none, and, of this machine, serves anew."""
        if not replica.takes_work:
            raise UnavailableError(f"Replica {replica.number} takes no work now: it is {replica.state}.")
        if sum(each.takes_work for each in self._replicas) == 1:
            raise UnavailableError("No other replica takes work now; the server itself drains at SIGTERM.")
        replica.is_drained = True
        while replica.is_drained or (replica.is_local and not replica.takes_work):
            if replica.is_given_up:
                raise UnavailableError(f"Replica {replica.number} could not be started anew; the log has the reason.")
            await asyncio.sleep(LOOK_SECONDS)

    async def keep(self, replica: Replica, path: str) -> None:
        """Start a replica of this machine, and again whenever it is lost."""
        wait, num_failed = FIRST_WAIT, 0
        settings, environment = self._settings_of(replica.number, path)
        while True:
            began, is_short = time.monotonic(), False
            try:
                replica.start(settings, environment, self._module)
                end = await self.until_lost(replica)
            except OSError as error:
                end = End(f"it cannot be started: {error}", was_loaded=False, is_planned=False)
                is_short = is_exhaustion(error)  # then not the fault of the replica
            finally:
                await replica.reap()
            if replica.error is not None and not any(each.model is not None for each in self._replicas):
                self._listener.hopeless(replica.error)  # as a rule the user's mistake: others will fail as well
                return
            num_failed = 0 if end.was_loaded else num_failed + (not is_short)
            if num_failed == MOST_FAILED_STARTS:
                _log.error("replica %d is given up: %s", replica.number, end.why)
                replica.is_given_up = True
                if all(each.is_given_up for each in self._replicas):
                    self._listener.hopeless(EngineDeadError("No replica can be started."))
                return
            if end.is_planned:
                _log.info("replica %d is drained, and started anew", replica.number)
                continue
            wait = FIRST_WAIT if time.monotonic() - began > WELL_SECONDS else wait
            _log.warning("replica %d is lost: %s; it is started again in %.1f s", replica.number, end.why, wait)
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    async def _watch(self, replica: Replica) -> None:
        """Follow a replica of another machine, which starts it again."""
        while True:
            await replica.connected.wait()
            end = await self.until_lost(replica)
            _log.warning("replica %d has gone: %s; another may connect", replica.number, end.why)

    async def until_lost(self, replica: Replica) -> End:
        """Wait until a replica is of no more use, and make that known."""
        why = ""
        looked = replica.heard = time.monotonic()
        while not why:
            with suppress(TimeoutError):
                await asyncio.wait_for(replica.lost.wait(), LOOK_SECONDS)
            before, looked = looked, time.monotonic()
            # Where this process itself stood still, what was said meanwhile has not been heard yet.
            silent = looked - replica.heard if looked - before < 4 * LOOK_SECONDS else 0.0
            if replica.is_drained and not replica.live:
                why = "it is drained"
            elif replica.process is not None and replica.process.poll() is not None:
                why = f"its process has ended with {replica.process.returncode}"
            elif replica.lost.is_set():
                why = "its connection has ended" if replica.error is None else str(replica.error)
            elif silent > (self._hang_timeout if replica.connected.is_set() else START_SECONDS):
                why = f"it has said nothing for {silent:.0f} s"
            elif replica.state == "hung":
                why = "a step hangs"
        end = End(why, was_loaded=replica.model is not None, is_planned=replica.is_drained and not replica.live)
        if end.is_planned:
            replica.say_last("stop")
        self._listener.lost(replica, UnavailableError(f"The replica that ran the request is lost: {why}."))
        replica.is_drained = False
        return end

    # Connections.

    async def connected_from_afar(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the connection of a replica on another machine."""
        await self._connected(reader, writer, is_local=False)

    async def _connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_local: bool = True
    ) -> None:
        """Hear a replica out."""
        replica = None
        try:
            found = self._find(await read_greeting(reader), is_local)
            if isinstance(found, str):
                self._warn("a replica is refused: %s", found)
                writer.write(messages.frame([messages.pack(("refused", found))]))
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
                said = await messages.read_frame(reader)
        except (EOFError, OSError, TimeoutError):
            pass  # it has gone, or is none
        except Exception as error:
            if replica is None:
                self._warn("a connection to the fleet's address is closed: %s", error)
            else:
                _log.exception("what a replica says makes no sense, and its connection is closed")
        finally:
            writer.close()
            if replica is not None and replica.is_connected_by(writer):
                replica.lost.set()

    def _warn(self, text: str, why: object) -> None:
        """Log once a second at most: strangers cause as many warnings as they like."""
        now = time.monotonic()
        if now - self._warned >= WARN_SECONDS:
            self._warned = now
            _log.warning(text, why)

    def _find(self, greeting: Greeting, is_local: bool) -> Replica | str:
        """Return the replica that has connected, or why it is none."""
        if is_local:
            number = greeting.number
            known = number.isdecimal() and int(number) < len(self._replicas)
            return self._replicas[int(number)] if known else "it has no number"
        assert self._door is not None
        if not is_same_key(greeting.key, self._door.key):
            return "its key is wrong"
        if greeting.version != __version__:
            return f"it is of version {shown(greeting.version)}, this server of {__version__}"
        free = (each for each in self._replicas if not each.is_local and not each.connected.is_set())
        return next(free, "as many replicas are connected as data_parallel_size allows")
