"""Model descriptions in Ollama's form; clients accept empty fields about files. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from jaxllm.errors import UserError
from jaxllm_server.requests.fields import Body, text
from jaxllm_server.requests.shared_fields import given
from jaxllm_server.shared.options import ServerOptions

_NEVER = "9999-12-31T23:59:59Z"


def model_name(fields: Body) -> str:
    return (text(fields, "model") or text(fields, "name") or "").removesuffix(":latest")


SHOW_FIELDS = frozenset({"model", "name", "verbose", "system", "template", "options"})


def asked_name(body: Body, policy: str = "refuse") -> str:
    name = model_name(given(body, SHOW_FIELDS, {}, policy))
    if not name:
        raise UserError("model is missing: name one of /api/tags.", "model")
    return name


def ollama_model(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of `/api/tags` and `/api/ps`; `card` is OpenAI's."""
    return {
        **{"name": card["id"], "model": card["id"], "modified_at": moment(card["created"]), "digest": ""},
        **{"size": 0, "size_vram": 0, "expires_at": _NEVER, "context_length": card["max_model_len"]},
        "details": _details(card),
    }


def ollama_details(card: Mapping[str, Any], options: ServerOptions, pools: bool) -> dict[str, Any]:
    parsers = {"tools": options.tool_call_parser, "thinking": options.reasoning_parser}
    found = ["completion", *(name for name, parser in parsers.items() if parser is not None)]
    return {
        **{"modified_at": moment(card["created"]), "template": "", "parameters": "", "details": _details(card)},
        "model_info": {"general.architecture": "jaxllm", "jaxllm.context_length": card["max_model_len"]},
        "capabilities": ["embedding"] if pools else found,
    }


def moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _details(card: Mapping[str, Any]) -> dict[str, Any]:
    unknown = dict.fromkeys(("family", "parameter_size", "quantization_level"), "")
    return {"parent_model": card["parent"] or "", "format": "safetensors", "families": [], **unknown}
