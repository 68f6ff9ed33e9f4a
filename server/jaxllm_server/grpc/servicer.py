"""Base class of `jaxllm.v1.InferenceService`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from uuid import uuid4

from google.protobuf.message import Message
from grpc.aio import ServicerContext

from jaxllm.errors import DeadlineError, SlowConsumerError
from jaxllm_server.access.client_quota import client_of, host_of_peer, peer_of

if TYPE_CHECKING:
    from jaxllm_server.access.auth import Keys
    from jaxllm_server.serving import Serving

Item = TypeVar("Item")
REQUEST_ID = "x-request-id"
_LARGE_REQUEST = 1 << 13  # bytes
_LEAST_REMAINING = 0.001  # seconds
_MAX_METADATA_CHARS = 256


class NamedRequest(Protocol):
    """A request with an optional id."""

    request_id: str


class Servicer:
    """Admits and reads calls."""

    def __init__(self, serving: Serving, stall_timeout: float, keys: Keys) -> None:
        self._serving = serving
        self._stall_timeout = stall_timeout
        self._keys = keys

    def _admit(self, request: NamedRequest, context: ServicerContext) -> tuple[str, bool, str]:
        """Return the request id, whether metadata gave it, and the client; raise without time or room."""
        remaining = context.time_remaining()
        if remaining is not None and remaining < _LEAST_REMAINING:
            raise DeadlineError("The deadline of this call was over before it began.")
        client = self._client_of(context)
        self._serving.check_room(client)
        hint = "" if request.request_id else first(context.invocation_metadata(), REQUEST_ID) or ""
        request_id = request.request_id or hint or uuid4().hex
        if _can_be_metadata(request_id):
            context.set_trailing_metadata(((REQUEST_ID, request_id),))
        return request_id, bool(hint), client

    async def _read(self, client: str, request: Message, read: Callable[..., Item], *given: Any, **named: Any) -> Item:
        if request.ByteSize() <= _LARGE_REQUEST:
            return read(request, *given, **named)
        return await self._serving.off_loop(client, partial(read, request, *given, **named))

    def _client_of(self, context: ServicerContext) -> str:
        key = self._keys.check(first(context.invocation_metadata(), "authorization"))
        return client_of(key, host_of_peer(peer_of(context.peer())))

    def _unique(self, request_id: str) -> str:
        ending = f"-{uuid4().hex[:8]}"
        return f"{request_id[: max(0, self._serving.options.max_request_id_chars - len(ending))]}{ending}"


class Writer:
    """Writes a stream; fails if the client reads nothing for `stall_timeout` seconds (0: never).

    Without a reader 4 MiB were taken before a write blocked. A timer per stream checks writes; a timeout around each
    costs 7 µs (measured).
    """

    def __init__(self, context: ServicerContext, stall_timeout: float) -> None:
        self._context = context
        self._stall_timeout = stall_timeout
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._is_stalled = False
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Writer:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        if self._stall_timeout > 0:
            self._timer = self._loop.call_later(self._stall_timeout, self._look)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def write(self, message: Message) -> None:
        """Send a message; raise SlowConsumerError if the client stalls."""
        self._since = self._loop.time()
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            if self._is_stalled and self._task.uncancel() == 0:
                raise SlowConsumerError(f"The stream was not read for {self._stall_timeout:g} seconds.") from None
            raise
        self._since = None

    def _look(self) -> None:
        now = self._loop.time()
        due = (now if self._since is None else self._since) + self._stall_timeout
        if due > now:
            self._timer = self._loop.call_at(due, self._look)
        else:
            self._is_stalled = True
            self._task.cancel()


def first(metadata: Any, key: str) -> str | None:
    return next((value for name, value in metadata or () if name == key and isinstance(value, str)), None)


def _can_be_metadata(value: str) -> bool:
    return len(value) <= _MAX_METADATA_CHARS and value.isascii() and value.isprintable()
