"""What stands before every gRPC call: keys, the bound of calls, traces, and exceptions made into statuses.

Knows nothing of what the services do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from jaxllm.errors import EngineError, OverloadedError, UserError
from jaxllm_server.grpc_errors import Failure, failure_of
from jaxllm_server.grpc_health import CONTROL, HEALTH
from jaxllm_server.grpc_service import REQUEST_ID, first

if TYPE_CHECKING:
    from jaxllm_server.auth import Keys
    from jaxllm_server.prometheus import PrometheusObserver
    from jaxllm_server.tracing import Tracer

_log = logging.getLogger("jaxllm.server.grpc")
CHANNELZ = "grpc.channelz.v1.Channelz"
_ADMIN_PREFIXES = (f"/{CONTROL}/", f"/{CHANNELZ}/")
_HEALTH_PREFIX = f"/{HEALTH}/"
_FAREWELL_SECONDS = 5.0  # for a status to leave; a client that reads nothing would hold its call for ever
_SPAN = {"rpc.system": "grpc"}
_KINDS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}

# Answers a raw request, and appends the parsed one to the list as soon as it is one.
Respond = Callable[[Any, grpc.aio.ServicerContext, list[Message]], Awaitable[Any]]


class Gate(grpc.aio.ServerInterceptor):
    """Stands before every call of every kind: lets in, counts, traces, and turns exceptions into statuses."""

    def __init__(self, keys: Keys, tracer: Tracer, observer: PrometheusObserver, max_rpcs: int) -> None:
        self._keys = keys
        self._tracer = tracer
        self._observer = observer
        self._max_rpcs = max_rpcs
        self._num_rpcs: Counter[str] = Counter()  # by connection
        self._guarded: dict[str, grpc.RpcMethodHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Check the key, before the request is even received, and wrap the method that answers."""
        method: str = handler_call_details.method
        if not method.startswith(_HEALTH_PREFIX):
            try:
                header = first(handler_call_details.invocation_metadata, "authorization")
                self._keys.check(header, admin=method.startswith(_ADMIN_PREFIXES))
            except Exception as error:  # what gRPC sees of it, a client sees, with the name of its class
                return self._refusal(method, error)
        guarded = self._guarded.get(method)
        if guarded is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None  # gRPC answers UNIMPLEMENTED
            guarded = self._guarded[method] = self._guard(method, handler)
        return guarded

    def _guard(self, method: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """Wrap a method; requests are parsed inside, because a parser's error would reach the client as it is."""
        kind = _KINDS[handler.request_streaming, handler.response_streaming]
        behaviour = getattr(handler, kind)
        parse = handler.request_deserializer
        if parse is None:
            raise TypeError(f"{method} takes bytes; every service is made of messages")

        async def respond(raw: Any, context: grpc.aio.ServicerContext, asked: list[Message]) -> Any:
            if handler.request_streaming:
                result = behaviour(_parsed(raw, parse), context)
            else:
                asked.append(_parse(raw, parse))
                result = behaviour(asked[0], context)
            if not hasattr(result, "__aiter__"):
                return await result
            async for response in result:
                await context.write(response)

        async def answer(raw: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                return await self._answer(method, context, respond, raw)
            except (grpc.aio.AbortError, grpc.aio.InternalError):
                raise  # a status was sent, or the client has gone
            except Exception as failure:  # of the gate itself: gRPC would tell the client its class and its text
                _log.error("%s failed before its answer", method, exc_info=failure)
                await _fail(context, failure_of(failure))

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(answer, request_deserializer=None, response_serializer=handler.response_serializer)

    async def _answer(self, method: str, context: grpc.aio.ServicerContext, respond: Respond, raw: Any) -> Any:
        """Answer one call and account for it; every exception becomes a status, and the log has the unforeseen ones."""
        is_counted = not method.startswith(_HEALTH_PREFIX)
        began = time.monotonic()
        span = self._tracer.start(first(context.invocation_metadata(), "traceparent"), method[1:], _SPAN)
        asked: list[Message] = []
        error: BaseException | None = None
        code = "OK"
        peer = context.peer()
        self._num_rpcs[peer] += is_counted
        try:
            if is_counted:
                self._check_room(peer)
            return await respond(raw, context, asked)
        except (grpc.aio.AbortError, grpc.aio.InternalError) as ended:  # a status was sent, or the client has gone
            error, code = ended, "CANCELLED"
            raise
        except (Exception, asyncio.CancelledError) as failure:
            error, code = failure, "CANCELLED"
            task = asyncio.current_task()
            if isinstance(failure, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # by gRPC: the call is over. A stray one would leave the client without a status
            told = failure_of(failure, asked[0] if asked else None, _request_id(context))
            code = told.code
            if code == "INTERNAL":
                # What the engine says itself is all there is to know; what nobody foresaw has a traceback.
                unforeseen = None if isinstance(failure, EngineError) else failure
                name = _request_id(context) or "without an id"
                _log.error("%s failed, request %s: %s", method, name, failure, exc_info=unforeseen)
            await _fail(context, told)
        finally:
            self._num_rpcs[peer] -= is_counted
            if not self._num_rpcs[peer]:
                del self._num_rpcs[peer]
            try:
                span.end(error)
                if is_counted:
                    self._observer.request_handled("grpc", method, code, time.monotonic() - began)
            except Exception:  # statistics are no reason to fail anybody
                _log.exception("the observer failed")

    def _check_room(self, peer: str) -> None:
        """Refuse one call too many, of all or of a connection: an eighth of the places is for others.

        HTTP/2's own bound of a connection's streams would be no help: until a client has heard of it, what it asks
        for beyond it fails as UNAVAILABLE (2,575 calls of a burst of 3,000, measured).
        """
        if self._num_rpcs.total() > self._max_rpcs:
            raise OverloadedError(f"The server is answering {self._max_rpcs} calls already.", retry_after=1.0)
        is_shared = peer.startswith("unix:")  # all clients of a Unix socket have one name
        most = self._max_rpcs - self._max_rpcs // 8
        if self._num_rpcs[peer] > most and not is_shared:
            raise OverloadedError(f"This connection has {most} calls already.", retry_after=1.0)

    def _refusal(self, method: str, error: Exception) -> grpc.RpcMethodHandler:
        """Return a method that fails at once. It takes a stream of requests, so that gRPC does not wait for one."""

        async def refuse(raw: Any, context: grpc.aio.ServicerContext, asked: list[Message]) -> None:
            raise error

        async def answer(raw: Any, context: grpc.aio.ServicerContext) -> None:
            await self._answer(method, context, refuse, raw)

        return grpc.stream_stream_rpc_method_handler(answer)


async def _fail(context: grpc.aio.ServicerContext, failure: Failure) -> None:
    """End a call with a status; always raises."""
    trailers: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", failure.status.SerializeToString())]
    if request_id := _request_id(context):
        trailers.append((REQUEST_ID, request_id))
    if failure.pushback_ms is not None:
        trailers.append(("grpc-retry-pushback-ms", str(failure.pushback_ms)))
    try:
        async with asyncio.timeout(_FAREWELL_SECONDS):
            await context.abort(grpc.StatusCode[failure.code], failure.status.message, tuple(trailers))
    except TimeoutError:
        raise asyncio.CancelledError from None  # the status waits behind what the client does not read


def _request_id(context: grpc.aio.ServicerContext) -> str:
    """Return the id that the service has given to the call so far; "" if none."""
    return first(context.trailing_metadata(), REQUEST_ID) or ""


def _parse(raw: bytes, parse: Callable[[bytes], Message]) -> Message:
    try:
        return parse(raw)
    except DecodeError as error:
        raise UserError("The request is not a message of this method.") from error


async def _parsed(raws: AsyncIterator[bytes], parse: Callable[[bytes], Message]) -> AsyncIterator[Message]:
    async for raw in raws:
        yield _parse(raw, parse)
