"""Interceptor of gRPC calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from jaxllm.errors import DeadlineError, EngineError, UserError
from jaxllm.freed_memory import return_freed_memory
from jaxllm_server.access.auth import only_header
from jaxllm_server.access.client_quota import CallLimit, peer_of
from jaxllm_server.grpc import wire
from jaxllm_server.grpc.error_details import Failure, failure_of
from jaxllm_server.grpc.health import CONTROL, HEALTH
from jaxllm_server.grpc.servicer import REQUEST_ID, first

if TYPE_CHECKING:
    from jaxllm_server.access.auth import Keys
    from jaxllm_server.observability.prometheus import PrometheusObserver
    from jaxllm_server.observability.tracing import Tracer

_log = logging.getLogger("jaxllm.server.grpc")
CHANNELZ = "grpc.channelz.v1.Channelz"
_ADMIN_PREFIXES = (f"/{CONTROL}/", f"/{CHANNELZ}/")
_HEALTH_PREFIX = f"/{HEALTH}/"
_FAREWELL_SECONDS = 5.0
# After a cancellation `read` returns EOF; gRPC has this long to cancel the task before EOF is the client's error.
_CANCEL_SECONDS = 0.05
_EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue] - Cython's
# Health checks need no key and may announce any size. Valid ones arrive with the call's first packet; of slow ones, a
# new one replaces the oldest (256 MiB by default).
_MAX_HEALTH_MESSAGES = 32
_HEALTH_SECONDS = 1.0
_HEALTH_LEAST_SECONDS = 0.05
_SPAN = {"rpc.system": "grpc"}
_LARGE_MESSAGE = 1 << 13  # bytes: 5 ms to check
_KINDS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}

Respond = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext, list[Message]], Awaitable[Any]]


class Gate(grpc.aio.ServerInterceptor):
    """Authenticates, counts and traces calls; converts exceptions to statuses."""

    def __init__(
        self, keys: Keys, tracer: Tracer, observer: PrometheusObserver, max_rpcs: int, stall_timeout: float
    ) -> None:
        self._keys = keys
        self._tracer = tracer
        self._observer = observer
        self._stall_timeout = stall_timeout
        # One connection may use seven eighths.
        self._calls = CallLimit("calls", max_rpcs, max_rpcs - max_rpcs // 8)
        self._health: dict[asyncio.Timeout, float] = {}  # start times, oldest first
        self._guarded: dict[str, grpc.RpcMethodHandler] = {}
        self._returns_memory: asyncio.TimerHandle | None = None
        self._parsers = ThreadPoolExecutor(1, "jaxllm-parse")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Check the key before the request is received; return the guarded handler."""
        method: str = handler_call_details.method
        if not method.startswith(_HEALTH_PREFIX):
            try:
                header = _authorization(handler_call_details.invocation_metadata)
                self._keys.check(header, admin=method.startswith(_ADMIN_PREFIXES))
            except Exception as error:  # gRPC would expose exceptions to the client
                return self._refusal(method, error)
        guarded = self._guarded.get(method)
        if guarded is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            guarded = self._guarded[method] = self._guard(method, handler)
        return guarded

    def _guard(self, method: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """Wrap a handler as a streaming one, to receive the message after admission.

        Requests are parsed inside: gRPC would expose a parser's error.
        """
        behaviour = getattr(handler, _KINDS[handler.request_streaming, handler.response_streaming])
        parse = handler.request_deserializer
        if parse is None:
            raise TypeError(f"{method} takes bytes; every service is made of messages")
        receive = self._receive_health if method.startswith(_HEALTH_PREFIX) else self._receive

        async def respond(raws: AsyncIterator[bytes], context: grpc.aio.ServicerContext, asked: list[Message]) -> Any:
            if handler.request_streaming:
                result = behaviour(self._parsed(raws, parse, asked), context)
            else:
                asked.append(await self._parse(await receive(context), parse))
                result = behaviour(asked[0], context)
            if not hasattr(result, "__aiter__"):
                return await result
            async for response in result:
                await context.write(response)

        async def answer(raws: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            try:
                return await self._answer(method, context, respond, raws)
            except (grpc.aio.AbortError, grpc.aio.InternalError):
                raise
            except Exception as failure:  # a bug of the gate; gRPC would expose it to the client
                _log.error("%s failed before its answer", method, exc_info=failure)
                await _fail(context, failure_of(failure))

        make = getattr(grpc, f"{_KINDS[True, handler.response_streaming]}_rpc_method_handler")
        return make(answer, request_deserializer=None, response_serializer=handler.response_serializer)

    async def _receive(self, context: grpc.aio.ServicerContext) -> bytes:
        return await self._one_message(context, asyncio.timeout(self._stall_timeout or None))

    async def _receive_health(self, context: grpc.aio.ServicerContext) -> bytes:
        now = asyncio.get_running_loop().time()
        while len(self._health) >= _MAX_HEALTH_MESSAGES:
            oldest, began = next(iter(self._health.items()))
            if now - began < _HEALTH_LEAST_SECONDS:
                break
            del self._health[oldest]
            if not oldest.expired():
                oldest.reschedule(now)
        limit = asyncio.timeout(_HEALTH_SECONDS)
        self._health[limit] = now
        try:
            return await self._one_message(context, limit)
        finally:
            self._health.pop(limit, None)

    async def _one_message(self, context: grpc.aio.ServicerContext, limit: asyncio.Timeout) -> bytes:
        """Receive a message and its end, so that no more bytes accumulate; raise DeadlineError at the limit."""
        try:
            async with limit:
                raw = await context.read()
                if raw is not _EOF and await context.read() is _EOF:
                    return raw
                await asyncio.sleep(_CANCEL_SECONDS)
                raise UserError("This method takes exactly one message.")
        except TimeoutError:
            raise self._did_not_come() from None

    def _did_not_come(self) -> DeadlineError:
        """Return the error for a late message; return freed memory to the system a second later."""
        if self._returns_memory is None:
            self._returns_memory = asyncio.get_running_loop().call_later(1.0, self._return_memory)
        return DeadlineError("The message was not received in time.")

    def _return_memory(self) -> None:
        self._returns_memory = None
        asyncio.get_running_loop().run_in_executor(None, return_freed_memory)

    async def _parsed(
        self, raws: AsyncIterator[bytes], parse: Callable[[bytes], Message], asked: list[Message]
    ) -> AsyncIterator[Message]:
        """Parse and yield messages; `asked` holds the latest. Raises DeadlineError after the stall timeout."""
        while True:
            try:
                async with asyncio.timeout(self._stall_timeout or None):
                    raw = await anext(raws, None)
            except TimeoutError:
                raise self._did_not_come() from None
            if raw is None:
                return
            asked[:] = [await self._parse(raw, parse)]
            yield asked[0]

    async def _parse(self, raw: bytes, parse: Callable[[bytes], Message]) -> Message:
        if len(raw) <= _LARGE_MESSAGE:
            return _parsed_message(raw, parse)
        return await asyncio.get_running_loop().run_in_executor(self._parsers, _parsed_message, raw, parse)

    async def _answer(
        self, method: str, context: grpc.aio.ServicerContext, respond: Respond, raws: AsyncIterator[bytes]
    ) -> Any:
        is_counted = not method.startswith(_HEALTH_PREFIX)
        began = time.monotonic()
        span = self._tracer.start(first(context.invocation_metadata(), "traceparent"), method[1:], _SPAN)
        asked: list[Message] = []
        error: BaseException | None = None
        code = "OK"
        place = ExitStack()
        try:
            if is_counted:
                place.enter_context(self._calls.place(peer_of(context.peer())))
            return await respond(raws, context, asked)
        except (grpc.aio.AbortError, grpc.aio.InternalError) as ended:
            error, code = ended, "CANCELLED"
            raise
        except (Exception, asyncio.CancelledError) as failure:
            error, code = failure, "CANCELLED"
            task = asyncio.current_task()
            if isinstance(failure, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # by gRPC; other cancellations must still send a status
            failure_sent = failure_of(failure, asked[0] if asked else None, _request_id(context))
            code = failure_sent.code
            if code == "INTERNAL":
                unforeseen = None if isinstance(failure, EngineError) else failure
                name = _request_id(context) or "without an id"
                _log.error("%s failed, request %s: %s", method, name, failure, exc_info=unforeseen)
            await _fail(context, failure_sent)
        finally:
            place.close()
            try:
                span.end(error)
                if is_counted:
                    self._observer.request_handled("grpc", method, code, time.monotonic() - began)
            except Exception:  # metrics must not fail a request
                _log.exception("the observer failed")
            error = None  # breaks a cycle through its traceback that would keep the message

    def _refusal(self, method: str, error: Exception) -> grpc.RpcMethodHandler:

        async def refuse(raws: Any, context: grpc.aio.ServicerContext, asked: list[Message]) -> None:
            raise error

        async def answer(raws: Any, context: grpc.aio.ServicerContext) -> None:
            await self._answer(method, context, refuse, raws)

        return grpc.stream_stream_rpc_method_handler(answer)


async def _fail(context: grpc.aio.ServicerContext, failure: Failure) -> None:
    trailers: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", failure.status.SerializeToString())]
    if request_id := _request_id(context):
        trailers.append((REQUEST_ID, request_id))
    if failure.pushback_ms is not None:
        trailers.append(("grpc-retry-pushback-ms", str(failure.pushback_ms)))
    try:
        async with asyncio.timeout(_FAREWELL_SECONDS):
            await context.abort(grpc.StatusCode[failure.code], failure.status.message, tuple(trailers))
    except grpc.aio.AbortError as aborted:
        # Break a cycle that would keep the message.
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(partial(_forget_frames, aborted))
        raise
    except TimeoutError:
        raise asyncio.CancelledError from None


def _forget_frames(error: BaseException, task: Any) -> None:
    error.__traceback__ = error.__context__ = None


def _authorization(metadata: Any) -> str | None:
    values = [value for name, value in metadata or () if name == "authorization"]
    return only_header([value if isinstance(value, str) else "" for value in values])


def _request_id(context: grpc.aio.ServicerContext) -> str:
    return first(context.trailing_metadata(), REQUEST_ID) or ""


def _parsed_message(raw: bytes, parse: Any) -> Message:
    wire.check(raw, parse.__self__.DESCRIPTOR)
    try:
        return parse(raw)
    except DecodeError as error:
        raise UserError("The request is not a message of this method.") from error
