"""The gRPC server: its socket and options, who may call, how exceptions become statuses, health and reflection.

Numbers and traps are those of grpc.md §3, measured there. Knows nothing of what the services do.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from jaxllm.errors import OverloadedError, UserError
from jaxllm.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from jaxllm_server.errors import AdminRequiredError, AuthError
from jaxllm_server.grpc_errors import Failure, failure_of
from jaxllm_server.grpc_service import REQUEST_ID, ControlService, InferenceService
from jaxllm_server.sockets import check_uds

if TYPE_CHECKING:
    from jaxllm_server.auth import Keys
    from jaxllm_server.options import ServerOptions
    from jaxllm_server.prometheus import PrometheusObserver
    from jaxllm_server.serving import Serving
    from jaxllm_server.tracing import Tracer

_log = logging.getLogger(__name__)

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
CONTROL = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
REFLECTION_ALPHA = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name
REFLECTION = "grpc.reflection.v1.ServerReflection"
CHANNELZ = "grpc.channelz.v1.Channelz"
_ADMIN_PREFIXES = (f"/{CONTROL}/", f"/{CHANNELZ}/")
_HEALTH_PREFIX = f"/{HEALTH}/"
_FAREWELL_SECONDS = 5.0  # for a status to leave; a client that reads nothing would hold its call for ever
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_SPAN = {"rpc.system": "grpc"}
_KINDS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}

Status = health_pb2.HealthCheckResponse.ServingStatus
# Answers a raw request, and appends the parsed one to the list as soon as it is one.
Respond = Callable[[Any, grpc.aio.ServicerContext, list[Message]], Awaitable[Any]]


class GrpcServer:
    """A server that listens; made by `start_grpc`."""

    def __init__(self, server: grpc.aio.Server, health: Health, port: int | None, uds: str | None) -> None:
        self.port = port  # None on a Unix socket
        self._server = server
        self._health = health
        self._uds = uds

    async def set_state(self, state: str) -> None:
        """Tell health checks what the engine does: a state of `AsyncLLM.state`."""
        self._health.set_state(state)

    async def stop(self, grace: float | None) -> None:
        """Take no more calls, let those that run finish for `grace` seconds, end the rest with UNAVAILABLE."""
        self._health.close()  # an open Watch would hold the server for the whole grace
        await self._server.stop(grace)
        if self._uds is not None:
            Path(self._uds).unlink(missing_ok=True)


async def start_grpc(
    serving: Serving, options: ServerOptions, keys: Keys, tracer: Tracer, observer: PrometheusObserver
) -> GrpcServer:
    """Listen and answer, health first: the engine may still be loading. Returns once calls are taken.

    Raises:
        UserError: a port or socket that is taken, a certificate that cannot be used, a package that is missing.
    """
    gate = Gate(keys, tracer, observer, options.max_rpcs)
    server = grpc.aio.server(interceptors=[gate], options=channel_options(options))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceService(serving, options.stall_timeout), server)
    control_pb2_grpc.add_ControlServiceServicer_to_server(ControlService(serving, options.stall_timeout), server)
    health = Health()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = [INFERENCE, CONTROL, HEALTH, REFLECTION_ALPHA]
    if options.enable_channelz:
        _add_channelz(server)
        names.append(CHANNELZ)
    _add_reflection(server, names)
    port = _listen(server, options)
    if options.grpc_uds is not None:
        Path(options.grpc_uds).chmod(0o700)
    await server.start()
    return GrpcServer(server, health, port, options.grpc_uds)


def channel_options(options: ServerOptions) -> list[tuple[str, int]]:
    """Return the settings of gRPC's core."""
    return [
        # A second server on the same port would start without a word and take a share of the connections.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", options.grpc_max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", options.max_header_bytes),
        ("grpc.absolute_max_metadata_size", options.max_header_bytes),
        # By default a burst of 3,000 calls loses some 530 of them.
        ("grpc.server.max_pending_requests", 100_000),
        ("grpc.server.max_pending_requests_hard_limit", 100_000),
        # Clients may ping every ten seconds, also while a call is silent for minutes. (The key that others set,
        # min_recv_ping_interval_without_data_ms, is not one.)
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # A peer that froze is let go after 40 seconds; without ping_timeout_ms the second setting alone waits for 60.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.enable_channelz", int(options.enable_channelz)),
    ]


def _listen(server: grpc.aio.Server, options: ServerOptions) -> int | None:
    """Bind the socket, with TLS where it was asked for; return the port, None for a Unix socket."""
    if options.grpc_uds is not None:
        check_uds(options.grpc_uds, "grpc_uds")  # gRPC itself would delete it and take its place
        address, flag = f"unix:{options.grpc_uds}", "grpc_uds"
    else:
        host = f"[{options.host}]" if ":" in options.host else options.host
        address, flag = f"{host}:{options.grpc_port}", "grpc_port"
    try:
        if options.ssl_certfile is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, _credentials(options))
    except RuntimeError as error:
        raise UserError(f"gRPC cannot listen on {address}: {_reason(options)}.", flag) from error
    return None if options.grpc_uds is not None else port


def _reason(options: ServerOptions) -> str:
    """Ask the system why an address cannot be bound; gRPC's own error does not say."""
    if options.grpc_uds is not None:
        return "the path is too long, or its folder is missing or not writable"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(options.host, options.grpc_port)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "the address was refused"


def _credentials(options: ServerOptions) -> grpc.ServerCredentials:
    """Read key and certificates; one that does not fit the other is refused here, where the reason is known."""
    assert options.ssl_certfile is not None and options.ssl_keyfile is not None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        pair = (Path(options.ssl_keyfile).read_bytes(), Path(options.ssl_certfile).read_bytes())
        authorities = None if options.ssl_ca_certs is None else Path(options.ssl_ca_certs).read_bytes()
    except OSError as error:
        raise UserError(f"ssl_keyfile and ssl_certfile cannot be used: {error.strerror}.", "ssl_certfile") from error
    return grpc.ssl_server_credentials([pair], authorities, options.ssl_client_auth)


def _add_reflection(server: grpc.aio.Server, names: Sequence[str]) -> None:
    """Describe the services under both names of reflection, whose messages are the same on the wire.

    The newer name is not in the list: its descriptor does not exist here, and clients that ask for all that is listed
    (`buf curl --list-methods`) fail on it.
    """
    servicer = ReflectionServicer(names)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    generic = grpc.method_handlers_generic_handler(REFLECTION, {"ServerReflectionInfo": handler})
    server.add_generic_rpc_handlers((generic,))


def _add_channelz(server: grpc.aio.Server) -> None:
    try:
        from grpc_channelz.v1 import channelz  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError("enable_channelz needs a package: pip install grpcio-channelz.", "enable_channelz") from error
    channelz.add_channelz_servicer(server)


class Health(health_pb2_grpc.HealthServicer):
    """grpc.health.v1: answers from what it was told, never from the engine.

    "" and the inference service serve while the engine does. The control service serves until the engine is dead: a
    paused or loading server must be reachable for those who look after it.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, Status] = {}
        self._changed = asyncio.Event()  # replaced at each change, so that every watcher wakes once
        self._is_closed = False
        self.set_state("loading")

    def set_state(self, state: str) -> None:
        """Follow a state of `AsyncLLM.state`; nothing follows `close`."""
        if self._is_closed:
            return
        inference = _SERVING if state == "serving" else _NOT_SERVING
        control = _NOT_SERVING if state in ("dead", "stopped") else _SERVING
        self._tell({"": inference, INFERENCE: inference, CONTROL: control})

    def close(self) -> None:
        """Serve nothing from now on, and end all watches once they have said so."""
        self._is_closed = True
        self._tell(dict.fromkeys(self._statuses, _NOT_SERVING))

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Answer for one service."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "There is no service of this name.")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Message, context: grpc.aio.ServicerContext) -> Message:
        """Answer for all services. Registered by grpcio-health-checking where that knows the call: 1.81 does not."""
        response = health_pb2.HealthListResponse()  # pyright: ignore[reportAttributeAccessIssue]
        for name, status in self._statuses.items():
            response.statuses[name].status = status
        return response

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """Answer for one service now and whenever that changes."""
        told: Status | None = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            if self._is_closed:
                return
            await changed.wait()

    def _tell(self, statuses: dict[str, Status]) -> None:
        self._statuses = statuses
        self._changed.set()
        self._changed = asyncio.Event()


class Gate(grpc.aio.ServerInterceptor):
    """Stands before every call of every kind: lets in, counts, traces, and turns exceptions into statuses."""

    def __init__(self, keys: Keys, tracer: Tracer, observer: PrometheusObserver, max_rpcs: int) -> None:
        self._keys = keys
        self._tracer = tracer
        self._observer = observer
        self._max_rpcs = max_rpcs
        self._num_rpcs = 0
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
                header = _first(handler_call_details.invocation_metadata, "authorization")
                self._keys.check(header, admin=method.startswith(_ADMIN_PREFIXES))
            except (AuthError, AdminRequiredError) as error:
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
        assert parse is not None, "every service is made of messages"

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
            return await self._answer(method, context, respond, raw)

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(answer, request_deserializer=None, response_serializer=handler.response_serializer)

    async def _answer(self, method: str, context: grpc.aio.ServicerContext, respond: Respond, raw: Any) -> Any:
        """Answer one call and account for it; every exception becomes a status, and the log has the unforeseen ones."""
        is_counted = not method.startswith(_HEALTH_PREFIX)
        began = time.monotonic()
        span = self._tracer.start(_first(context.invocation_metadata(), "traceparent"), method[1:], _SPAN)
        asked: list[Message] = []
        error: BaseException | None = None
        code = "OK"
        self._num_rpcs += is_counted
        try:
            if is_counted and self._num_rpcs > self._max_rpcs:
                raise OverloadedError(f"The server is answering {self._max_rpcs} calls already.", retry_after=1.0)
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
                _log.error("%s failed, request %s", method, _request_id(context) or "without an id", exc_info=failure)
            await _fail(context, told)
        finally:
            self._num_rpcs -= is_counted
            span.end(error)
            if is_counted:
                self._observer.request_handled("grpc", method, code, time.monotonic() - began)

    def _refusal(self, method: str, error: AuthError | AdminRequiredError) -> grpc.RpcMethodHandler:
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
    return _first(context.trailing_metadata(), REQUEST_ID) or ""


def _parse(raw: bytes, parse: Callable[[bytes], Message]) -> Message:
    try:
        return parse(raw)
    except DecodeError as error:
        raise UserError("The request is not a message of this method.") from error


async def _parsed(raws: AsyncIterator[bytes], parse: Callable[[bytes], Message]) -> AsyncIterator[Message]:
    async for raw in raws:
        yield _parse(raw, parse)


def _first(metadata: Any, key: str) -> str | None:
    """Return the first value of a key of metadata as text."""
    return next((value for name, value in metadata or () if name == key and isinstance(value, str)), None)
