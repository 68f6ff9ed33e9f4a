"""Bodies of vLLM's routes that update weights. Pure."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import UserError
from jaxllm_server.requests.fields import Body, mapping, text
from jaxllm_server.requests.shared_fields import given

INIT_FIELDS = frozenset({"init_info"})
UPDATE_FIELDS = frozenset({"update_info"})
FINISH_FIELDS = frozenset({"weight_version"})


def init_request_of(body: Body) -> str:
    info = _info(body, "init_info", INIT_FIELDS, ("backend",))
    return text(info, "backend") or "safetensors"


def update_request_of(body: Body) -> tuple[str, str | None]:
    """Return the folder's path below the root, and the version."""
    info = _info(body, "update_info", UPDATE_FIELDS, ("path", "weight_version"))
    path = text(info, "path")
    if not path:
        raise UserError("update_info needs a path, that of a folder below --weights-root.", "update_info")
    return path, text(info, "weight_version")


def finish_request_of(body: Body) -> str | None:
    return text(given(body, FINISH_FIELDS, {}), "weight_version")


def _info(body: Body, name: str, fields: frozenset[str], known: tuple[str, ...]) -> dict[str, Any]:
    info = mapping(given(body, fields, {}), name)
    if info is None:
        raise UserError(f"{name} is missing.", name)
    for each in info:
        if each not in known:
            raise UserError(f"{name} has no field {each!r:.80}, only {' and '.join(known)}.", name)
    return info
