"""Build the gRPC server. Numbers were measured with grpcio 1.81."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from jaxllm.errors import UserError
from jaxllm.v1 import control_pb2_grpc, inference_pb2_grpc
from jaxllm_server.access.sockets import check_uds, listen
from jaxllm_server.grpc.filter_process import FilterProcess
from jaxllm_server.grpc.gate import CHANNELZ, Gate
from jaxllm_server.grpc.health import CONTROL, HEALTH, INFERENCE, Health
from jaxllm_server.grpc.service import ControlService, InferenceService

if TYPE_CHECKING:
    from jaxllm_server.access.auth import Keys
    from jaxllm_server.observability.prometheus import PrometheusObserver
    from jaxllm_server.observability.tracing import Tracer
    from jaxllm_server.serving import Serving
    from jaxllm_server.shared.options import ServerOptions

REFLECTION_ALPHA = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name
REFLECTION = "grpc.reflection.v1.ServerReflection"
_NAMES = ("gRPC", "grpc_port", "grpc_uds")


class GrpcServer:
    """A listening server."""

    def __init__(
        self, server: grpc.aio.Server, health: Health, port: int | None, uds: str | None, front: FilterProcess | None
    ) -> None:
        self.port = port
        self._server = server
        self._health = health
        self._uds = uds
        self.front = front

    async def set_state(self, state: str) -> None:
        self._health.set_state(state)

    async def stop(self, grace: float | None) -> None:
        """Refuse new calls, let running ones finish for `grace` seconds, then end them with UNAVAILABLE."""
        if self.front is not None:
            self.front.close_listener()
        self._health.close()  # an open Watch would last the whole grace
        await self._server.stop(grace)
        if self.front is not None:
            await self.front.end()
        if self._uds is not None:
            Path(self._uds).unlink(missing_ok=True)


async def start_grpc(
    serving: Serving, options: ServerOptions, keys: Keys, tracer: Tracer, observer: PrometheusObserver
) -> GrpcServer:
    """Return a started server; the engine may still be loading.

    Raises UserError for an unusable port, socket or certificate, or a missing package.
    """
    gate = Gate(keys, tracer, observer, options.max_rpcs, options.stall_timeout)
    server = grpc.aio.server(interceptors=[gate], options=channel_options(options))
    inference = InferenceService(serving, options.stall_timeout, keys)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server)
    control_pb2_grpc.add_ControlServiceServicer_to_server(ControlService(serving, options.stall_timeout), server)
    health = Health()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = [INFERENCE, CONTROL, HEALTH, REFLECTION_ALPHA]
    if options.enable_channelz:
        _add_channelz(server)
        names.append(CHANNELZ)
    _add_reflection(server, names)
    if not options.grpc_filter:
        port = _listen(server, options)
        if options.grpc_uds is not None:
            Path(options.grpc_uds).chmod(0o700)
        await server.start()
        return GrpcServer(server, health, port, options.grpc_uds, None)
    listening = listen(options.host, options.grpc_port, options.grpc_uds, _NAMES)
    port = None if options.grpc_uds is not None else listening[0].getsockname()[1]
    try:
        front = FilterProcess(listening, options)
    except UserError:
        _close(listening)
        raise
    server.add_insecure_port(front.address)
    await server.start()
    try:
        front.start()
    except OSError as error:
        await server.stop(None)
        await front.end()
        _close(listening)
        message = f"the process for gRPC's connections cannot be started ({error.strerror}): try --no-grpc-filter."
        raise UserError(message, "grpc_filter") from error
    return GrpcServer(server, health, port, options.grpc_uds, front)


def channel_options(options: ServerOptions) -> list[tuple[str, int]]:
    # Calls not yet accepted by Python, 7 KB each. gRPC's default loses 530 of 3,000 at once. The filter queues bursts.
    most_pending = 8192 if options.grpc_filter else 100_000
    return [
        # A second server on the port would share its connections.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", options.grpc_max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", options.max_header_bytes),
        ("grpc.absolute_max_metadata_size", options.max_header_bytes),
        ("grpc.server.max_pending_requests", most_pending),
        ("grpc.server.max_pending_requests_hard_limit", most_pending),
        # Streams opened before a client receives this limit fail as UNAVAILABLE (of 3,000 calls 1,948 with 1,024, none
        # with 4,096).
        ("grpc.max_concurrent_streams", max(4096, 2 * options.max_rpcs)),
        # Clients may ping ten times a second. gRPC lacks the key min_recv_ping_interval_without_data_ms.
        ("grpc.http2.min_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 100),
        ("grpc.keepalive_permit_without_calls", 1),
        # Drops a silent peer after 40 s; without ping_timeout_ms keepalive_timeout_ms waits for 60.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.enable_channelz", int(options.enable_channelz)),
    ]


def _listen(server: grpc.aio.Server, options: ServerOptions) -> int | None:
    if options.grpc_uds is not None:
        check_uds(options.grpc_uds, "grpc_uds")  # gRPC would replace it
        address, flag = f"unix:{options.grpc_uds}", "grpc_uds"
    else:
        host = f"[{options.host}]" if ":" in options.host else options.host
        address, flag = f"{host}:{options.grpc_port}", "grpc_port"
        # gRPC's error has no reason and floods the log.
        _close(listen(options.host, options.grpc_port, None, _NAMES))
    try:
        if options.ssl_certfile is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, _credentials(options))
    except RuntimeError as error:
        reason = "the address was refused"
        if options.grpc_uds is not None:
            reason = "the path is too long, or its folder is missing or not writable"
        raise UserError(f"gRPC cannot listen on {address}: {reason}.", flag) from error
    return None if options.grpc_uds is not None else port


def _close(listening: Sequence[socket.socket]) -> None:
    for each in listening:
        each.close()


def _credentials(options: ServerOptions) -> grpc.ServerCredentials:
    assert options.ssl_certfile is not None and options.ssl_keyfile is not None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        pair = (Path(options.ssl_keyfile).read_bytes(), Path(options.ssl_certfile).read_bytes())
        authorities = None if options.ssl_ca_certs is None else Path(options.ssl_ca_certs).read_bytes()
    except OSError as error:
        raise UserError(f"ssl_keyfile and ssl_certfile cannot be used: {error.strerror}.", "ssl_certfile") from error
    return grpc.ssl_server_credentials([pair], authorities, options.ssl_client_auth)


def _add_reflection(server: grpc.aio.Server, names: Sequence[str]) -> None:
    """Serve reflection under both of its names.

    The newer name, whose descriptor is missing, is not listed: clients that describe listed services (`buf curl
    --list-methods`) would fail.
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
