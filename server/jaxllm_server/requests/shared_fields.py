"""Fields shared by several routes, with vLLM's names and defaults; checks shapes only. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxllm.errors import UnsupportedError, UserError
from jaxllm.sampling_fields import OPENAI, names_in
from jaxllm.sampling_params import SamplingParams
from jaxllm_server.requests.constraints import FIELDS as CONSTRAINTS
from jaxllm_server.requests.constraints import constraint_of
from jaxllm_server.requests.fields import Body, flag, integer, is_same, mapping, one_of, text
from jaxllm_server.requests.unknown_fields import OF_OTHER_ROUTES, check

# SamplingParams refuses values of those not built.
SAMPLING = frozenset(names_in(SamplingParams, OPENAI))
# On a server of one model without storage.
WITHOUT_EFFECT = frozenset(
    (
        *("user", "store", "metadata", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
    )
)
# Not built -> values that change nothing.
UNBUILT: Mapping[str, tuple[Any, ...]] = {
    "guided_decoding_backend": ("auto",),
    "structural_tag": (),
    "logits_processors": ([],),
    "session_id": ("",),
}
TRUNCATION_SIDES = ("left", "right")
# Of `use_beam_search`; defaults are always accepted.
_BEAMS: Mapping[str, Any] = {"length_penalty": 1.0, "early_stopping": False}
SHARED = (
    SAMPLING
    | WITHOUT_EFFECT
    | UNBUILT.keys()
    | CONSTRAINTS
    | {"model", "stream", "stream_options", "request_id", "priority", "cache_salt", "add_special_tokens"}
    | {"return_token_ids", "return_tokens_as_token_ids", "logprobs", "vllm_xargs", "truncation_side"}
    | {"time_limit", "kv_transfer_params"}
    | {"use_beam_search", *_BEAMS}
)
_OURS = SHARED | OF_OTHER_ROUTES


def given(
    body: Body,
    known: Collection[str],
    unbuilt: Mapping[str, tuple[Any, ...]],
    policy: str = "refuse",
    ignored: list[str] | None = None,
) -> dict[str, Any]:
    """Return the fields that are not null; append unknown ones that `policy` ignores to `ignored`.

    Raises UserError for an unknown field that `policy` (`--unknown-fields`) refuses, UnsupportedError for an `unbuilt`
    one with a value not accepted.
    """
    passed = check(body, known, _OURS, policy)
    if ignored is not None:
        ignored += passed
    fields = {name: value for name, value in body.items() if value is not None and name in known}
    for name in fields.keys() & unbuilt.keys():
        if not any(is_same(fields[name], accepted) for accepted in unbuilt[name]):
            raise UnsupportedError(f"{name} is not supported by jaxllm yet.", name)
    return fields


def sampling_of(fields: Body) -> dict[str, Any]:
    if fields.get("stream") is True and "prompt_logprobs" in fields:
        raise UserError("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    sampling = {name: fields[name] for name in SAMPLING if name in fields}
    if is_same(sampling.get("thinking_token_budget"), -1):  # vLLM's value for unlimited
        del sampling["thinking_token_budget"]
    constraint = constraint_of(fields)
    if constraint is not None:
        sampling["structured_outputs"] = constraint[1]
    return sampling | ({"extra_args": fields["vllm_xargs"]} if "vllm_xargs" in fields else {})


def beams_of(fields: Body) -> dict[str, Any] | None:
    asked = {name: fields[name] for name in _BEAMS if name in fields}
    if flag(fields, "use_beam_search", False):
        return asked
    for name, value in asked.items():
        if not is_same(value, _BEAMS[name]):
            raise UserError(f"{name} requires use_beam_search=true.", name)
    return None


def names_of(fields: Body) -> dict[str, str]:
    """Return the request's field for each parameter in errors, where different."""
    names = {"extra_args": "vllm_xargs"}
    given = [name for name in fields if name in CONSTRAINTS and name != "structured_outputs"]
    if "structured_outputs" not in fields and given:
        names["structured_outputs"] = given[0]
    return names


def shared_call_fields(fields: Body) -> dict[str, Any]:
    """Return the `Call` fields common to completions and chats."""
    return {
        "model": text(fields, "model") or "",
        "priority": integer(fields, "priority", 0),
        "cache_salt": text(fields, "cache_salt"),
        "beams": beams_of(fields),
        "add_special_tokens": flag(fields, "add_special_tokens", None),
        "truncation_side": one_of(fields, "truncation_side", TRUNCATION_SIDES) or "left",
        "stream": bool(flag(fields, "stream", False)),
        "time_limit": fields.get("time_limit"),
        "kv_transfer_params": mapping(fields, "kv_transfer_params") or None,
    }
