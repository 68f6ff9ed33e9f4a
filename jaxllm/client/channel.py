"""Connection settings of both clients, and conversion of gRPC errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxllm.client.errors import read_error
from jaxllm.errors import EngineError, UserError
from jaxllm.v1 import control_pb2_grpc, inference_pb2_grpc
from jaxllm.version import __version__

_HEALTH = {
    health_pb2.HealthCheckResponse.SERVING: "serving",
    health_pb2.HealthCheckResponse.NOT_SERVING: "not_serving",
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN: "service_unknown",
}
# Only of calls that have not begun; the server's grpc-retry-pushback-ms overrides these waits.
_RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "jaxllm.v1.InferenceService"}, {"service": "jaxllm.v1.ControlService"}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.2s",
                "maxBackoff": "5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
            },
        }
    ]
}
_KEEPALIVE = (
    # Detects a frozen peer within 40 s of a call.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC's two minutes are too long.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 3_000),
)


class Endpoint:
    """The address of a server, and how to connect to it.

    `target` is host:port or unix:/path. `timeout`, in seconds, limits a whole call, unless the call has one. `api_key`
    is sent with every call, so use TLS unless the server is local: `tls=True`, or the files `ssl_ca_certs` (authority;
    None: the system's), `ssl_certfile` and `ssl_keyfile` (client certificate). `retries` attempts a call up to four
    times while the server is unavailable or full. `metadata` is sent with every call; `channel_options` override gRPC
    options. Raises `UserError` for a malformed address or unreadable file.
    """

    def __init__(
        self,
        target: str = "localhost:50051",
        *,
        api_key: str | None = None,
        tls: bool = False,
        ssl_ca_certs: str | Path | None = None,
        ssl_certfile: str | Path | None = None,
        ssl_keyfile: str | Path | None = None,
        timeout: float | None = None,
        retries: bool = True,
        metadata: Mapping[str, str] | None = None,
        channel_options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        if "://" in target and target.partition(":")[0] not in ("dns", "unix", "ipv4", "ipv6", "xds"):
            raise UserError(f"target must be host:port or unix:/path, got {target!r}.", "target", target)
        if ":" not in target:
            raise UserError(f"target needs a port, as in {target or 'localhost'}:50051.", "target", target)
        if (ssl_certfile is None) != (ssl_keyfile is None):
            raise UserError("ssl_certfile and ssl_keyfile must be given together.", "ssl_keyfile", ssl_keyfile)
        self.target = target
        self.timeout = timeout
        has_tls = tls or ssl_ca_certs is not None or ssl_certfile is not None
        self._credentials = (
            grpc.ssl_channel_credentials(*(_read(file) for file in (ssl_ca_certs, ssl_keyfile, ssl_certfile)))
            if has_tls
            else None
        )
        self._options = [
            *_KEEPALIVE,
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.primary_user_agent", f"jaxllm-python/{__version__}"),
            ("grpc.enable_retries", int(retries)),
            ("grpc.service_config", json.dumps(_RETRIES if retries else {})),
            *channel_options,
        ]
        key = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._metadata = tuple((key | {name.lower(): value for name, value in (metadata or {}).items()}).items())
        self._open()

    def _open(self) -> None:
        raise NotImplementedError

    def _connect(self, library: Any) -> Any:
        if self._credentials is None:
            channel = library.insecure_channel(self.target, self._options)
        else:
            channel = library.secure_channel(self.target, self._credentials, self._options)
        self._stubs: dict[str, Any] = {
            "inference": inference_pb2_grpc.InferenceServiceStub(channel),
            "control": control_pb2_grpc.ControlServiceStub(channel),
            "health": health_pb2_grpc.HealthStub(channel),
        }
        return channel

    def _start(self, call: Any) -> Any:
        rpc = getattr(self._stubs[call.service], call.method)
        timeout = self.timeout if call.timeout is None else call.timeout
        return rpc(call.request, timeout=timeout, metadata=self._metadata)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.target!r})"


def error_of(failure: Any, target: str) -> UserError | EngineError:
    trailers = dict(failure.trailing_metadata() or ())
    return read_error(failure.code().name, failure.details() or "", trailers.get("grpc-status-details-bin"), target)


def read_health(response: health_pb2.HealthCheckResponse) -> str:
    return _HEALTH.get(response.status, "unknown")


def _read(file: str | Path | None) -> bytes | None:
    try:
        return None if file is None else Path(file).read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.", "tls", str(file)) from error
