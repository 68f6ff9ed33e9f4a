"""Everything `jaxllm serve` can be told about its front ends: one frozen dataclass, checked when it is made.

Names and defaults are vLLM's where the thing exists there; every bound of a request is a field here. What concerns the
engine is `EngineConfig`. Knows no protocol library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxllm.errors import UserError

_BODIES_AT_ONCE = 16  # of the largest kind, 128 MiB
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of one server. Sizes are bytes, times are seconds."""

    # Where it listens.
    host: str = "127.0.0.1"  # of both front ends; 0.0.0.0 for every interface
    port: int | None = 8000  # of HTTP; None: off
    uds: str | None = None  # a Unix socket for HTTP instead of a port
    grpc_port: int | None = 50051  # of gRPC; None: off
    grpc_uds: str | None = None  # a Unix socket for gRPC instead of a port

    # What it is called and how it speaks.
    served_model_name: tuple[str, ...] = ()  # names clients may use; answers give the first; default: the model's
    chat_template: str | None = None  # file that replaces the model's own template
    default_chat_template_kwargs: str | None = None  # JSON object: variables of every chat template call
    response_role: str = "assistant"
    tool_call_parser: str | None = None  # how the model writes tool calls; None: tools are refused
    reasoning_parser: str | None = None  # how the model writes its reasoning; None: it is content
    return_tokens_as_token_ids: bool = False  # "token_id:N" in place of a token's text in log-probabilities
    enable_prompt_tokens_details: bool = False  # tell how many prompt tokens were cached
    enable_force_include_usage: bool = False  # a usage chunk in every HTTP stream
    enable_request_id_headers: bool = True  # x-request-id in every HTTP response

    # Who may come in.
    api_key: tuple[str, ...] = ()  # any of these opens everything but health
    admin_api_key: tuple[str, ...] = ()  # for what shows or ends the work of all; needed where there are several keys
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None  # of the clients
    ssl_client_auth: bool = False  # refuse clients without a certificate that ssl_ca_certs signed
    share_prefix_cache: bool = False  # among API keys; without it each of several has a cache of its own
    allowed_origins: tuple[str, ...] = ()  # of browsers; none: no CORS, and cross-origin requests are refused
    allowed_hosts: tuple[str, ...] = ()  # Host headers taken on loopback beside its own names
    root_path: str = ""  # prefix that a proxy in front strips

    # Bounds of one request.
    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 16 << 10
    max_headers: int = 64
    max_json_depth: int = 64
    max_prompts: int = 128  # in one completions call
    max_n: int = 16
    max_sequences: int = 128  # n times prompts
    max_stops: int = 4
    max_stop_chars: int = 64  # of one stop string
    max_stop_token_ids: int = 128
    max_tools: int = 128
    max_request_id_chars: int = 128  # also of cache_salt
    grpc_max_message_bytes: int = 8 << 20

    # Bounds of all requests together.
    max_queued_requests: int | None = None  # waiting for a slot; default: 4 for each of max_num_seqs
    max_queued_tokens: int | None = None  # of their prompts; default: 16 times max_model_len, at least 65,536
    max_sequences_per_client: int | None = None  # under way, of an API key or else an address; default: no bound
    max_receiving_bytes: int | None = None  # of HTTP bodies, half of it a client's; default: 16 times max_body_bytes
    max_rpcs: int = 1024  # calls at once, on each front end; seven eighths of them on one connection of gRPC
    request_timeout: float = 600.0  # a request that is not through by then fails
    stall_timeout: float = 30.0  # for a request to come whole; a stream not read for so long is closed; 0: never

    # Its life.
    shutdown_timeout: float = 30.0  # streams may finish for so long once a signal came
    drain_delay: float = 0.0  # between "not ready" and refusing work, for load balancers to notice
    hang_timeout: float = 8.0  # a step that takes longer makes the server "not ready"
    log_stats_interval: float = 10.0  # 0: no such lines
    enable_log_requests: bool = False
    otlp_traces_endpoint: str | None = None  # where OpenTelemetry traces go, as http://localhost:4318/v1/traces
    enable_channelz: bool = False  # gRPC's own debugging service
    profile: str | None = None  # a folder for a trace of the first steps
    profile_steps: int = 64  # of that trace
    record: str | None = None  # a file for every call of the scheduler, for `jaxllm replay`
    record_redacted: bool = False  # with pseudonyms in place of tokens
    record_max_bytes: int = 256 << 20  # of the recording, which ends there

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), str(field.type))
        for name in ("port", "grpc_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise UserError(f"{name} must be from 0 to 65535, or none to switch it off, got {value}.", name)
        if self.port is None and self.uds is None and self.grpc_port is None and self.grpc_uds is None:
            raise UserError("both front ends are off: give --port, --uds, --grpc-port or --grpc-uds.", "port")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise UserError("TLS needs both ssl_keyfile and ssl_certfile.", "ssl_keyfile")
        if self.ssl_client_auth and (self.ssl_ca_certs is None or self.ssl_certfile is None):
            raise UserError("ssl_client_auth needs ssl_ca_certs, ssl_keyfile and ssl_certfile.", "ssl_client_auth")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "chat_template"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise UserError(f"{name}: there is no file {path}.", name)
        if self.most_receiving_bytes < self.max_body_bytes:
            raise UserError("max_receiving_bytes must be at least max_body_bytes.", "max_receiving_bytes")
        if self.max_request_id_chars < 40:  # what the server makes up itself has to fit
            raise UserError("max_request_id_chars must be at least 40.", "max_request_id_chars")
        if self.hang_timeout <= 0.0:
            raise UserError("hang_timeout must be positive.", "hang_timeout")
        if self.profile_steps < 1:
            raise UserError("profile_steps must be at least 1.", "profile_steps")
        if self.record_redacted and self.record is None:
            raise UserError("record_redacted needs record, the file.", "record_redacted")
        if any(not key for key in (*self.api_key, *self.admin_api_key)):
            raise UserError("an API key cannot be empty.", "api_key")

    @property
    def most_sequences(self) -> int:
        """The most that one call may ask for: n times prompts."""
        return min(self.max_sequences, self.max_sequences_per_client or self.max_sequences)

    @property
    def most_receiving_bytes(self) -> int:
        """The most that HTTP bodies which are not read yet may hold together."""
        return _BODIES_AT_ONCE * self.max_body_bytes if self.max_receiving_bytes is None else self.max_receiving_bytes

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server over the network."""
        return self.host in LOOPBACK


def _check_type(name: str, value: Any, kind: str) -> None:
    """Refuse a value of another type, or a number that cannot bound anything."""
    if value is None and "None" in kind:
        return
    if kind.startswith("tuple"):
        if not isinstance(value, tuple) or any(not isinstance(item, str) for item in value):
            raise UserError(f"{name} must be a list of texts, got {value!r}.", name)
    elif kind.startswith("str"):
        if not isinstance(value, str):
            raise UserError(f"{name} must be a text, got {value!r}.", name)
    elif kind.startswith("bool"):
        if not isinstance(value, bool):
            raise UserError(f"{name} must be true or false, got {value!r}.", name)
    elif isinstance(value, bool) or not isinstance(value, int if kind.startswith("int") else int | float):
        raise UserError(f"{name} must be a number, got {value!r}.", name)
    elif not math.isfinite(value) or value < (1 if name.startswith(("max_", "grpc_max")) else 0):
        raise UserError(f"{name} is out of range: {value!r}.", name)


def template_kwargs(options: ServerOptions) -> Mapping[str, Any]:
    """Read `default_chat_template_kwargs`."""
    import json

    if options.default_chat_template_kwargs is None:
        return {}
    try:
        value = json.loads(options.default_chat_template_kwargs)
    except ValueError as error:
        raise UserError(f"default_chat_template_kwargs is not JSON: {error}", "default_chat_template_kwargs") from error
    if not isinstance(value, dict):
        raise UserError("default_chat_template_kwargs must be a JSON object.", "default_chat_template_kwargs")
    return value
