"""Settings of KV transfer between engines, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from jaxllm.errors import UserError

Role = Literal["kv_producer", "kv_consumer", "kv_both"]
FailurePolicy = Literal["recompute", "fail"]
CONNECTOR = "GrpcConnector"
CONNECTORS = (CONNECTOR, "NixlConnector")  # vLLM's


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """`kv_connector_extra_config`; files are PEM."""

    timeout: float = 10.0  # seconds, then a request's blocks are computed
    lease: float = 30.0  # seconds that a producer keeps unpulled blocks
    buffer_gib: float = 4.0  # a producer's memory for unpulled blocks
    advertised_ip: str | None = None  # `remote_host` of answers, None: `kv_ip`
    producers: tuple[str, ...] = ("127.0.0.1", "localhost", "::1")  # hosts to consume from; "*": any
    api_key: str | None = field(default=None, repr=False)  # required by a producer, sent by a consumer
    tls_certificate: str | None = None  # of a producer
    tls_key: str | None = None  # of a producer
    tls_ca: str | None = None  # of a consumer: use TLS, and trust these authorities


@dataclass(frozen=True, kw_only=True)
class KvTransferConfig:
    """The role of an engine in KV transfer."""

    kv_role: Role
    kv_connector: str = CONNECTOR
    kv_ip: str = "127.0.0.1"  # of a listening producer
    kv_port: int = 0  # 0: any free port
    kv_load_failure_policy: FailurePolicy = "recompute"
    engine_id: str | None = None  # in answers; None: random
    kv_connector_extra_config: TransferOptions = field(default_factory=TransferOptions)

    @property
    def produces(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def consumes(self) -> bool:
        return self.kv_role != "kv_producer"

    def __post_init__(self) -> None:
        _check_choice("kv_role", self.kv_role, get_args(Role))
        _check_choice("kv_connector", self.kv_connector, CONNECTORS)
        _check_choice("kv_load_failure_policy", self.kv_load_failure_policy, get_args(FailurePolicy))
        port, options = self.kv_port, self.kv_connector_extra_config
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
            raise _error(f"kv_port must be a port or 0, got {port!r:.80}")
        _check_text("kv_ip", self.kv_ip)
        if self.engine_id is not None:
            _check_text("engine_id", self.engine_id)
        for name in ("timeout", "lease", "buffer_gib"):
            value = getattr(options, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 2**20:
                raise _error(f"{name} must be a number above 0, got {value!r:.80}")
        for name in ("advertised_ip", "api_key", "tls_certificate", "tls_key", "tls_ca"):
            if getattr(options, name) is not None:
                _check_text(name, getattr(options, name))
        hosts = options.producers
        if not isinstance(hosts, list | tuple) or not all(isinstance(host, str) for host in hosts):
            raise _error(f"producers must be a list of hosts, got {hosts!r:.80}")
        if (options.tls_certificate is None) != (options.tls_key is None):
            raise _error("tls_certificate and tls_key need each other")


def read(given: object) -> KvTransferConfig:
    if isinstance(given, KvTransferConfig):
        return given
    table = _known("it", given, KvTransferConfig)
    if "kv_role" not in table:
        raise _error(f"kv_role is missing: one of {', '.join(get_args(Role))}")
    options = table.get("kv_connector_extra_config", {})
    if not isinstance(options, TransferOptions):
        table["kv_connector_extra_config"] = TransferOptions(
            **_known("kv_connector_extra_config", options, TransferOptions)
        )
    return KvTransferConfig(**table)


def secured(
    config: KvTransferConfig, api_key: str | None, certificate: str | None, key: str | None
) -> KvTransferConfig:
    """Return a configuration with a server's key and, for a producer, certificate, unless it has others."""
    options = config.kv_connector_extra_config
    if options.api_key is None:
        options = replace(options, api_key=api_key)
    if config.produces and options.tls_certificate is None:
        options = replace(options, tls_certificate=certificate, tls_key=key)
    return replace(config, kv_connector_extra_config=options)


def _known(what: str, given: object, kind: type[Any]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise _error(f"{what} must be an object, got {given!r:.80}")
    names = [each.name for each in fields(kind)]
    table = {str(name): value for name, value in given.items() if value is not None}
    unknown = [name for name in table if name not in names]
    if unknown:
        raise _error(f"{what} has no {unknown[0]!r:.80}, only {', '.join(names)}")
    return table


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise _error(f"{name} must be one of {', '.join(choices)}, got {value!r:.80}")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise _error(f"{name} must be a text, got {value!r:.80}")


def _error(text: str) -> UserError:
    return UserError(f"kv_transfer_config: {text}.", "kv_transfer_config")
