"""The server's settings, named as in vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxllm.errors import UserError
from jaxllm.setting import setting

_MAY_BE_ZERO = frozenset({"max_stored_response_bytes"})  # 0 disables the feature
_PARSED = 4  # memory per byte of JSON: 1 for text, 4 to 20 for numbers and lists
_BODIES_AT_ONCE = 16  # maximum-size bodies, 128 MiB by default
_FORM_BYTES = 1 << 18  # of a form without its file
AUDIO_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
UNKNOWN_FIELDS = ("refuse", "warn", "ignore")
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """A server's settings; sizes in bytes, times in seconds."""

    # Addresses.
    host: str = setting("127.0.0.1", "address of both front ends; 0.0.0.0: every interface", "ADDRESS")
    port: int | None = setting(8000, "port of the HTTP server; none: disabled", "PORT")
    uds: str | None = setting(None, "Unix socket for HTTP instead of a port", "PATH")
    grpc_port: int | None = setting(50051, "port of the gRPC server; none: disabled", "PORT")
    grpc_uds: str | None = setting(None, "Unix socket for gRPC instead of a port", "PATH")

    # Names and API behavior.
    served_model_name: tuple[str, ...] = setting(
        (), "names of the model in requests; answers have the first one (default: the model's)", takes_several=True
    )
    lora_modules: tuple[str, ...] = setting(
        (),
        "LoRA adapters to load at the start, each served as a model with its name: NAME=PATH, or "
        '{"name": NAME, "path": PATH}; needs --enable-lora',
        "MODULE",
        takes_several=True,
    )
    lora_root: str | None = setting(
        None, "folder of the adapters that can be loaded while the server runs (default: loading is refused)", "DIR"
    )
    weights_root: str | None = setting(
        None, "folder of weights that /update_weights may read, with --enable-sleep-mode (default: none)", "DIR"
    )
    chat_template: str | None = setting(None, "file with a chat template that replaces the model's", "FILE")
    default_chat_template_kwargs: str | None = setting(
        None, "JSON object: variables of the chat template in every request", "JSON"
    )
    response_role: str = setting("assistant", "role of the answers to a chat")
    tool_call_parser: str | None = setting(
        None,
        "how the model writes tool calls: auto (by its chat template), hermes, llama3_json, mistral, qwen3_coder …, as "
        "in docs/apis.md (default: none, tools are refused)",
    )
    reasoning_parser: str | None = setting(
        None,
        "how the model writes its reasoning: auto (by its chat template), qwen3, deepseek_r1, mistral, granite …, as "
        "in docs/apis.md (default: none, reasoning is content)",
    )
    unknown_fields: str = setting(
        "warn",
        "handling of unknown fields in HTTP bodies: refuse; warn (ignore harmless fields of other servers, with a "
        "header and a log line; refuse others); ignore",
        "POLICY",
    )
    return_tokens_as_token_ids: bool = setting(False, "write token_id:N for a token's text in log-probabilities")
    enable_prompt_tokens_details: bool = setting(False, "report how many prompt tokens were cached")
    enable_force_include_usage: bool = setting(
        False, "report the usage in every event of HTTP streams, and at their ends"
    )
    enable_tokenizer_info_endpoint: bool = setting(
        False, "serve /tokenizer_info, which shows the chat template and the special tokens"
    )
    disable_fastapi_docs: bool = setting(False, "serve neither /openapi.json nor /docs (the name is vLLM's)")
    enable_request_id_headers: bool = setting(True, "send x-request-id with every HTTP response")

    # Access.
    api_key: tuple[str, ...] = setting(
        (),
        "key that clients must send, over HTTP to every path but /health, /live, /ready, /ping, /docs and "
        "/openapi.json, over gRPC to all but health; may be repeated: any of them is accepted",
        "KEY",
    )
    admin_api_key: tuple[str, ...] = setting(
        (),
        "key for administration: over HTTP /metrics (Prometheus has to send it), /load, /drain and the routes that "
        "load adapters, pause, sleep and update weights, over gRPC the control service; may be repeated (default: the "
        "only --api-key; with several, none is accepted)",
        "KEY",
    )
    ssl_keyfile: str | None = setting(None, "private key, for TLS on both front ends", "FILE")
    ssl_certfile: str | None = setting(None, "certificate, for TLS on both front ends", "FILE")
    ssl_ca_certs: str | None = setting(None, "CA certificates that verify those of clients", "FILE")
    ssl_client_auth: bool = setting(False, "refuse clients without a certificate that --ssl-ca-certs verifies")
    share_prefix_cache: bool = setting(
        False, "share one prefix cache between API keys; otherwise each of several has a separate one"
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "origin of web pages that may call the server (CORS); may be repeated", "ORIGIN"
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "host name accepted in Host headers; on loopback its own names are accepted too; *: any; may be repeated",
        "HOST",
    )
    forwarded_allow_ips: tuple[str, ...] = setting(
        (),
        "proxy whose X-Forwarded-For header is trusted: an address, a network, or * for every peer; may be repeated",
        "ADDRESS",
    )
    root_path: str = setting("", "path prefix that a proxy in front of the server strips", "PREFIX")

    # Replicas on other machines, in `data_parallel_size`.
    data_parallel_size_local: int | None = setting(None, "replicas on this machine (default: all)")
    data_parallel_address: str | None = setting(
        None,
        "address for replicas on other machines, which need the first --admin-api-key; with --ssl-certfile over TLS",
        "HOST:PORT",
    )
    headless: bool = setting(
        False,
        "run without front ends: a replica of the server at --data-parallel-address, or with --num-hosts a host of "
        "rank above 0",
    )
    data_parallel_ca_certs: str | None = setting(
        None, "CA certificates with which a --headless replica verifies the server; enables TLS", "FILE"
    )

    # Hosts that share one model.
    num_hosts: int = setting(1, "hosts that share the model, each with a process")
    host_rank: int = setting(0, "number of this host, from 0; host 0 serves, the others need --headless")
    coordinator: str | None = setting(
        None, "address of host 0 in the hosts' private network; the next port is used too", "HOST:PORT"
    )
    restart: bool = setting(False, "run the server in a child process, and start it again when it fails")

    # Limits per request.
    max_body_bytes: int = setting(8 << 20, "maximum bytes of an HTTP body", "BYTES")
    max_audio_bytes: int = setting(25 << 20, "maximum bytes of a file of sound", "BYTES")
    max_audio_seconds: float = setting(1800.0, "maximum seconds of a file of sound; 0: any", "SECONDS")
    max_header_bytes: int = setting(16 << 10, "maximum bytes of all headers of an HTTP request", "BYTES")
    max_headers: int = setting(64, "maximum headers of an HTTP request")
    max_json_depth: int = setting(64, "maximum nesting depth of an HTTP body")
    max_prompts: int = setting(2048, "maximum prompts of a completions call")
    max_pooling_inputs: int = setting(2048, "maximum texts of a call that embeds, classifies or scores")
    max_n: int = setting(128, "maximum outputs per prompt")
    max_sequences: int = setting(2048, "maximum outputs of a call: n times its prompts")
    max_stops: int = setting(16, "maximum stop strings of a request")
    max_stop_chars: int = setting(256, "maximum characters of a stop string")
    max_stop_token_ids: int = setting(128, "maximum stop token ids of a request")
    max_tools: int = setting(128, "maximum tools of a request")
    max_request_id_chars: int = setting(128, "maximum characters of a request id or cache salt")
    grpc_max_message_bytes: int = setting(8 << 20, "maximum bytes of a gRPC request", "BYTES")

    # Limits over all requests.
    max_queued_requests: int | None = setting(
        None, "maximum requests that wait for a slot (default: 4,096, or 4 for each slot if that is more)"
    )
    max_queued_tokens: int | None = setting(
        None, "maximum prompt tokens that wait (default: 16 contexts, at least 1,048,576)"
    )
    max_sequences_per_client: int | None = setting(
        None, "maximum concurrent outputs for each API key, or for each address if there are no keys"
    )
    max_receiving_bytes: int | None = setting(
        None,
        "maximum bytes of HTTP bodies being received, in total; a client may use half of it; requests being "
        "answered, in the background too, may use four times as much",
        "BYTES",
    )
    max_stored_response_bytes: int = setting(
        64 << 20, "maximum bytes of stored responses; the oldest are removed first; 0: none are stored", "BYTES"
    )
    max_rpcs: int = setting(2048, "maximum concurrent calls on each front end; further calls are refused")
    request_timeout: float = setting(600.0, "seconds after which a request fails; 0: never", "SECONDS")
    stall_timeout: float = setting(
        30.0,
        "seconds after which an incomplete request, or a stream that is not read, is ended; 0: never",
        "SECONDS",
    )

    # Operation.
    shutdown_timeout: float = setting(30.0, "seconds for running requests to finish after SIGTERM or ^C", "SECONDS")
    drain_delay: float = setting(0.0, 'seconds between "not ready" and refusing work', "SECONDS")
    hang_timeout: float = setting(
        8.0, 'seconds after which a step that has not ended makes the server "not ready"', "SECONDS"
    )
    log_stats_interval: float = setting(10.0, "seconds between two lines of statistics; 0: none", "SECONDS")
    enable_log_requests: bool = setting(False, "write a line for each request")
    otlp_traces_endpoint: str | None = setting(
        None, "endpoint for OpenTelemetry traces, such as http://localhost:4318/v1/traces", "URL"
    )
    enable_channelz: bool = setting(False, "serve gRPC's debugging service")
    grpc_filter: bool = setting(
        True, "accept gRPC connections in a separate process that checks frames and disconnects floods"
    )
    profile: str | None = setting(
        None, "write a trace of the first steps into this folder, for ui.perfetto.dev; streams pause during it", "DIR"
    )
    profile_steps: int = setting(64, "steps of that trace")
    record: str | None = setting(None, "record every call of the scheduler in this file, for `jaxllm replay`", "FILE")
    record_redacted: bool = setting(False, "write pseudonyms in place of tokens")
    record_max_bytes: int = setting(
        256 << 20, "maximum bytes of the recording, at least 1M; recording stops there", "BYTES"
    )

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), str(field.type))
        for name in ("port", "grpc_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise UserError(f"{name} must be from 0 to 65535, or none to disable it, got {value}.", name)
        if self.port is None and self.uds is None and self.grpc_port is None and self.grpc_uds is None:
            raise UserError("both front ends are disabled: give --port, --uds, --grpc-port or --grpc-uds.", "port")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise UserError("TLS needs both ssl_keyfile and ssl_certfile.", "ssl_keyfile")
        if self.ssl_client_auth and (self.ssl_ca_certs is None or self.ssl_certfile is None):
            raise UserError("ssl_client_auth needs ssl_ca_certs, ssl_keyfile and ssl_certfile.", "ssl_client_auth")
        if self.unknown_fields not in UNKNOWN_FIELDS:
            message = f"unknown_fields must be one of {', '.join(UNKNOWN_FIELDS)}, got {self.unknown_fields!r}."
            raise UserError(message, "unknown_fields")
        self._check_fleet()
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "chat_template", "data_parallel_ca_certs"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise UserError(f"{name}: there is no file {path}.", name)
        for name in ("lora_root", "weights_root"):
            folder = getattr(self, name)
            if folder is not None and not Path(folder).is_dir():
                raise UserError(f"{name}: there is no folder {folder}.", name)
        if self.most_receiving_bytes < self.max_body_bytes:
            raise UserError("max_receiving_bytes must be at least max_body_bytes.", "max_receiving_bytes")
        if self.max_request_id_chars < 40:  # generated ids must fit
            raise UserError("max_request_id_chars must be at least 40.", "max_request_id_chars")
        if self.hang_timeout <= 0.0:
            raise UserError("hang_timeout must be positive.", "hang_timeout")
        if self.profile_steps < 1:
            raise UserError("profile_steps must be at least 1.", "profile_steps")
        if self.record_redacted and self.record is None:
            raise UserError("record_redacted requires record.", "record_redacted")
        if any(not key for key in (*self.api_key, *self.admin_api_key)):
            raise UserError("an API key cannot be empty.", "api_key")

    def _check_fleet(self) -> None:
        if self.num_hosts < 1:
            raise UserError(f"num_hosts must be at least 1, got {self.num_hosts}.", "num_hosts")
        if self.num_hosts > 1:
            if self.coordinator is None:
                raise UserError("num_hosts above 1 needs coordinator, the address of host 0.", "coordinator")
            if self.data_parallel_address is not None or self.data_parallel_size_local is not None:
                raise UserError(
                    "num_hosts is for one engine; data_parallel_address and data_parallel_size_local are for several. "
                    "Leave one of them out.",
                    "num_hosts",
                )
            if self.headless != (self.host_rank > 0):
                raise UserError(
                    "headless is for host_rank above 0: host 0 serves, the others have no front ends.", "headless"
                )
        elif self.coordinator is not None or self.host_rank:
            raise UserError("coordinator and host_rank need num_hosts above 1.", "num_hosts")
        elif self.headless and self.data_parallel_address is None:
            raise UserError("headless requires data_parallel_address, the server's address.", "data_parallel_address")
        if self.data_parallel_address is not None and not self.admin_api_key:
            raise UserError("data_parallel_address needs admin_api_key, the same on both machines.", "admin_api_key")
        if self.data_parallel_ca_certs is not None and not self.headless:
            raise UserError("data_parallel_ca_certs requires headless.", "data_parallel_ca_certs")

    def body_limit(self, path: str) -> int:
        """Return the maximum bytes of a path's body; that of a file of sound has other fields too."""
        return self.max_audio_bytes + _FORM_BYTES if path.endswith(AUDIO_PATHS) else self.max_body_bytes

    @property
    def most_sequences(self) -> int:
        """The maximum of n times prompts."""
        return min(self.max_sequences, self.max_sequences_per_client or self.max_sequences)

    @property
    def most_receiving_bytes(self) -> int:
        return _BODIES_AT_ONCE * self.max_body_bytes if self.max_receiving_bytes is None else self.max_receiving_bytes

    @property
    def most_request_bytes(self) -> int:
        return _PARSED * self.most_receiving_bytes

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK


def _check_type(name: str, value: Any, kind: str) -> None:
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
    elif not math.isfinite(value) or value < (name.startswith(("max_", "grpc_max")) and name not in _MAY_BE_ZERO):
        raise UserError(f"{name} is out of range: {value!r}.", name)


def template_kwargs(options: ServerOptions) -> Mapping[str, Any]:
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
