"""Bodies of vLLM's `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`. Pure."""

from __future__ import annotations

from jaxllm_server.requests.fields import Body, flag, text
from jaxllm_server.requests.shared_fields import given

UNBUILT = {"is_3d_lora_weight": (False,)}
LOAD_FIELDS = frozenset({"lora_name", "lora_path", "load_inplace", *UNBUILT})
UNLOAD_FIELDS = frozenset({"lora_name", "lora_int_id"})


def load_request_of(body: Body) -> tuple[str, str, bool]:
    """Return name, path, and whether to replace a namesake; missing texts are ""."""
    fields = given(body, LOAD_FIELDS, UNBUILT)
    in_place = bool(flag(fields, "load_inplace", False))
    return text(fields, "lora_name") or "", text(fields, "lora_path") or "", in_place


def unload_request_of(body: Body) -> str:
    """Return the adapter's name; `lora_int_id` is ignored, as in vLLM."""
    return text(given(body, UNLOAD_FIELDS, {}), "lora_name") or ""
