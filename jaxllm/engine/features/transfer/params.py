"""`kv_transfer_params` of a request, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxllm.errors import UserError
from jaxllm.kv_transfer_config import KvTransferConfig

_NAMES = (
    *("do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_request_id", "remote_block_ids"),
    *("remote_host", "remote_port", "tp_size"),
)


class Remote(NamedTuple):
    """The blocks of a prompt at a producer."""

    target: str  # host:port
    lease: str


@dataclass(frozen=True, slots=True)
class TransferParams:
    """The transfers of a request."""

    keeps: bool = False  # its prompt's blocks
    remote: Remote | None = None  # has its prompt's blocks


def read(given: object, config: KvTransferConfig) -> TransferParams | None:
    """Read a request's transfer, if any; raise UserError for one that is not allowed."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise _error(f"it must be an object, got {given!r:.80}")
    table: dict[str, Any] = {str(name): value for name, value in given.items() if value is not None}
    unknown = [name for name in table if name not in _NAMES]
    if unknown:
        raise _error(f"it has no {unknown[0]!r:.80}, only {', '.join(_NAMES)}")
    keeps, pulls = (table.get(name, False) for name in ("do_remote_decode", "do_remote_prefill"))
    for name, value in (("do_remote_decode", keeps), ("do_remote_prefill", pulls)):
        if not isinstance(value, bool):
            raise _error(f"{name} must be true or false, got {value!r:.80}")
    if keeps and not config.produces:
        raise _error(f"do_remote_decode needs a producer, and kv_role is {config.kv_role}")
    if not pulls:
        return TransferParams(keeps=True) if keeps else None
    if not config.consumes:
        raise _error(f"do_remote_prefill needs a consumer, and kv_role is {config.kv_role}")
    return TransferParams(keeps, _remote(table, config))


def _remote(table: Mapping[str, Any], config: KvTransferConfig) -> Remote:
    host, port, lease = (table.get(name) for name in ("remote_host", "remote_port", "remote_request_id"))
    if not isinstance(host, str) or not 0 < len(host) <= 253 or not host.isascii() or not host.isprintable():
        raise _error(f"remote_host must be a host, got {host!r:.80}")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise _error(f"remote_port must be a port, got {port!r:.80}")
    if not isinstance(lease, str) or not 0 < len(lease) <= 256:
        raise _error(f"remote_request_id must be a text of at most 256 characters, got {lease!r:.80}")
    known = config.kv_connector_extra_config.producers
    if host not in known and "*" not in known:  # a request must not choose where the key is sent
        raise _error(f"remote_host {host!r:.80} is none of the consumer's producers in kv_connector_extra_config")
    return Remote(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", lease)


def _error(text: str) -> UserError:
    return UserError(f"kv_transfer_params: {text}.", "kv_transfer_params")
