"""What requests and replies of the OpenAI API have in common: fields, usage, log-probabilities, errors, model cards.

Pure functions of their arguments, on plain dicts. A request's shape is checked here; its numbers are checked where all
front ends' are, in `SamplingParams` and `Serving`. Names and defaults beyond OpenAI's are vLLM's. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxllm.checks import INT32_MAX
from jaxllm.errors import UnsupportedError, UserError
from jaxllm.outputs import Logprob
from jaxllm.sampling_fields import OPENAI, names_in
from jaxllm.sampling_params import SamplingParams
from jaxllm_server.openai.constraints import FIELDS as CONSTRAINTS
from jaxllm_server.openai.constraints import constraint_of
from jaxllm_server.openai.unknown_fields import OF_OTHER_ROUTES, check
from jaxllm_server.shared.calls import Call, Chunk, Part, Usage
from jaxllm_server.shared.error_table import code_of, message_of, row_of
from jaxllm_server.shared.options import ServerOptions

Body = Mapping[str, Any]

LEAST_LOGPROB = -9999.0  # in place of -inf, which JSON does not have; vLLM's number
_SHOWN_NAME = 64  # characters of a field's name that an error repeats

# Handed to SamplingParams under the same names, with any value; of those that it has not built it refuses every value
# but the default.
SAMPLING = frozenset(names_in(SamplingParams, OPENAI))
# Clients send these; on a server with one model and no store they can change nothing.
WITHOUT_EFFECT = frozenset(
    (
        *("user", "store", "metadata", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
    )
)
# Fields that other servers have and jaxllm has not built; the values listed ask for nothing and are accepted.
UNBUILT: Mapping[str, tuple[Any, ...]] = {
    "guided_decoding_backend": ("auto",),
    "structural_tag": (),
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
    "session_id": ("",),
}
TRUNCATION_SIDES = ("left", "right")  # where `truncate_prompt_tokens` cuts
# Of a beam search, beside `use_beam_search`: with their defaults, which ask for nothing.
_BEAMS: Mapping[str, Any] = {"length_penalty": 1.0, "early_stopping": False}
SHARED = (
    SAMPLING
    | WITHOUT_EFFECT
    | UNBUILT.keys()
    | CONSTRAINTS
    | {"model", "stream", "stream_options", "request_id", "priority", "cache_salt", "add_special_tokens"}
    | {"return_token_ids", "return_tokens_as_token_ids", "logprobs", "vllm_xargs", "truncation_side"}
    | {"time_limit"}  # jaxllm's own
    | {"use_beam_search", *_BEAMS}
)
_OURS = SHARED | OF_OTHER_ROUTES
_FINISH_REASONS = {"context": "length", "time_limit": "length"}  # OpenAI's API has no others for them


@dataclass(frozen=True, kw_only=True)
class Form:
    """What of an answer the client wants to see, and how."""

    stream: bool
    include_usage: bool  # at the end of a stream
    continuous_usage: bool  # in each event of a stream
    return_token_ids: bool
    tokens_as_ids: bool  # "token_id:N" in place of a token's text in log-probabilities
    num_logprobs: int | None  # alternatives to each token; None: no log-probabilities, -1: the vocabulary
    shows_prompt_logprobs: bool
    shows_cached: bool
    shows_reasoning: bool
    logprob_ids: Sequence[int] | None = None  # these tokens in place of the likeliest ones


class Reply(Protocol):
    """One request's calls, and how their chunks are written. It remembers how far it has written, and nothing else."""

    calls: Sequence[Call]
    form: Form
    is_stream: bool
    request_id: str
    id_prefix: str
    object: str  # of the whole answer
    chunk_object: str  # of an event of a stream
    names: Mapping[str, str]  # parameter that an error names -> field of the request, where they differ

    @property
    def ignored(self) -> Sequence[str]:
        """The fields of the request that it is answered without."""
        ...

    def response(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Return what follows the head of the whole answer; one chunk for each call."""
        ...

    def events(self, number: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return what follows the head of each event that a chunk of call `number` becomes."""
        ...

    def last_event(self) -> dict[str, Any] | None:
        """Return what follows the head of the event after all others: the usage, where it was asked for."""
        ...


# Requests.


def given(
    body: Body,
    known: Collection[str],
    unbuilt: Mapping[str, tuple[Any, ...]],
    policy: str = "refuse",
    ignored: list[str] | None = None,
) -> dict[str, Any]:
    """Return the fields that are set: null is not.

    `policy` is `--unknown-fields`; the names of fields that it lets pass are appended to `ignored`.

    Raises:
        UserError: for an unknown field that `policy` refuses, with the nearest name.
        UnsupportedError: for one of `unbuilt` with a value that asks for something.
    """
    passed = check(body, known, _OURS, policy)
    if ignored is not None:
        ignored += passed
    fields = {name: value for name, value in body.items() if value is not None and name in known}
    for name in fields.keys() & unbuilt.keys():
        if not any(_is_same(fields[name], accepted) for accepted in unbuilt[name]):
            raise UnsupportedError(f"{name} is not supported by jaxllm yet.", name)
    return fields


def sampling_of(fields: Body) -> dict[str, Any]:
    """Return what a request says about sampling, unchecked."""
    if fields.get("stream") is True and "prompt_logprobs" in fields:
        raise UserError("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    sampling = {name: fields[name] for name in SAMPLING if name in fields}
    if _is_same(sampling.get("thinking_token_budget"), -1):  # vLLM's "no bound"
        del sampling["thinking_token_budget"]
    constraint = constraint_of(fields)
    if constraint is not None:
        sampling["structured_outputs"] = constraint[1]
    return sampling | ({"extra_args": fields["vllm_xargs"]} if "vllm_xargs" in fields else {})


def beams_of(fields: Body) -> dict[str, Any] | None:
    """Return what a request says about its beam search; None if it wants none."""
    asked = {name: fields[name] for name in _BEAMS if name in fields}
    if flag(fields, "use_beam_search", False):
        return asked
    for name, value in asked.items():
        if not _is_same(value, _BEAMS[name]):
            raise UserError(f"{name} is of a beam search: it needs use_beam_search.", name)
    return None


def names_of(fields: Body) -> dict[str, str]:
    """Return what errors call parameters that a request of either kind may have given by another name."""
    names = {"extra_args": "vllm_xargs"}
    given = [name for name in fields if name in CONSTRAINTS and name != "structured_outputs"]
    if "structured_outputs" not in fields and given:
        names["structured_outputs"] = given[0]
    return names


def shared_call_fields(fields: Body) -> dict[str, Any]:
    """Return the fields of `Call` that both kinds of request have under the same names."""
    return {
        "model": text(fields, "model") or "",
        "priority": integer(fields, "priority", 0),
        "cache_salt": text(fields, "cache_salt"),
        "beams": beams_of(fields),
        "add_special_tokens": flag(fields, "add_special_tokens", None),
        "truncation_side": one_of(fields, "truncation_side", TRUNCATION_SIDES) or "left",
        "stream": bool(flag(fields, "stream", False)),
        "time_limit": fields.get("time_limit"),  # the engine checks it
    }


def form_of(fields: Body, options: ServerOptions, num_logprobs: Any) -> Form:
    """Return how a request wants to be answered."""
    stream = bool(flag(fields, "stream", False))
    wanted = mapping(fields, "stream_options") or {}
    if not stream and any(value not in (None, False) for value in wanted.values()):
        raise UserError("stream_options needs stream=true.", "stream_options")
    for name in wanted:
        # Obfuscation pads events against observers of an encrypted line; OpenAI's client may ask for none.
        if name not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
            raise UserError(f"{name[:_SHOWN_NAME]!r} is not a field of stream_options.", "stream_options")
    include_usage = bool(flag(wanted, "include_usage", False)) or options.enable_force_include_usage
    return Form(
        stream=stream,
        include_usage=include_usage,
        continuous_usage=options.enable_force_include_usage
        or (include_usage and bool(flag(wanted, "continuous_usage_stats", False))),
        return_token_ids=bool(flag(fields, "return_token_ids", False)),
        tokens_as_ids=bool(flag(fields, "return_tokens_as_token_ids", options.return_tokens_as_token_ids)),
        num_logprobs=num_logprobs if isinstance(num_logprobs, int) else None,
        logprob_ids=fields.get("logprob_token_ids"),
        shows_prompt_logprobs="prompt_logprobs" in fields,
        shows_cached=options.enable_prompt_tokens_details,
        shows_reasoning=options.reasoning_parser is not None,
    )


def flag(fields: Body, name: str, default: bool | None) -> bool | None:
    """Return a field that must be true or false."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{name} must be true or false.", name)
    return default if value is None else value


def text(fields: Body, name: str) -> str | None:
    """Return a field that must be a string."""
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{name} must be a string.", name)
    return value


def one_of(fields: Body, name: str, choices: Sequence[str]) -> str | None:
    """Return a field that must be one of some words."""
    value = text(fields, name)
    if value is not None and value not in choices:
        raise UserError(f"{name} must be one of {', '.join(choices)}, got {value[:_SHOWN_NAME]!r}.", name)
    return value


def integer(fields: Body, name: str, default: int) -> int:
    """Return a field that must be a whole number of 32 bits."""
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not -INT32_MAX - 1 <= value <= INT32_MAX:
        raise UserError(f"{name} must be an integer of 32 bits.", name)
    return value


def mapping(fields: Body, name: str) -> dict[str, Any] | None:
    """Return a field that must be an object."""
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{name} must be an object.", name)
    return value


def prompts_of(fields: Body, name: str, most: int) -> list[str | list[int]]:
    """Distinguish the four forms of a prompt; ids are checked by the engine, which knows its vocabulary."""
    value = fields.get(name)
    if value is None:
        raise UserError(f"{name} is missing: give a string, a list of strings, or token ids.", name)
    if isinstance(value, str):
        return [value]
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if kinds == {int}:
        return [value]
    if kinds not in ({str}, {list}):
        message = f"{name} must be a string, a list of strings, a list of token ids or a list of those."
        raise UserError(message, name)
    if len(value) > most:
        raise UserError(f"{name} may hold at most {most} prompts, got {len(value)}.", name)
    if kinds == {list} and any(set(map(type, ids)) - {int} for ids in value):
        raise UserError(f"{name} must hold token ids only, or strings only.", name)
    return value


def _is_same(value: Any, accepted: Any) -> bool:
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)


# Replies.


def finish_reason(part: Part) -> str | None:
    """Return why an output ended, in OpenAI's words."""
    reason = part.finish_reason
    return None if reason is None else _FINISH_REASONS.get(reason, reason)


def usage_without(usage: Usage, parts: Iterable[Part]) -> Usage:
    """Return what a chunk's usage was before some of its parts: what has been sent when they are still to come."""
    parts = list(parts)
    return replace(
        usage,
        completion_tokens=usage.completion_tokens - sum(len(part.token_ids) for part in parts),
        reasoning_tokens=usage.reasoning_tokens - sum(part.num_reasoning for part in parts),
    )


def usage_fields(usages: Iterable[Usage], form: Form) -> dict[str, Any]:
    """Return the tokens that a request's calls have used together."""
    prompt = completion = cached = reasoning = 0
    for usage in usages:
        prompt += usage.prompt_tokens
        completion += usage.completion_tokens
        cached += usage.cached_prompt_tokens
        reasoning += usage.reasoning_tokens
    fields: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if form.shows_cached:
        fields["prompt_tokens_details"] = {"cached_tokens": cached}
    if form.shows_reasoning:
        fields["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return fields


def token_name(token: int, entry: Logprob, form: Form, before_bytes: str = "") -> str:
    """Return a token's name in log-probabilities: its text, or its bytes in OpenAI's notation."""
    if form.tokens_as_ids or not entry.decoded_token:
        return f"token_id:{token}"
    if entry.raw_bytes is None:
        return entry.decoded_token
    return before_bytes + "".join(f"\\x{byte:02x}" for byte in entry.raw_bytes)


def reported(entries: Sequence[dict[int, Logprob]] | None, form: Form) -> Sequence[dict[int, Logprob]] | None:
    """Return the log-probabilities to show, the sampled token's first.

    With `logprob_token_ids` these are of the sampled and the named tokens, without likelier ones, as in vLLM.
    """
    ids = form.logprob_ids
    if entries is None or not ids:
        return entries
    return [
        {token: entry for place, (token, entry) in enumerate(candidates.items()) if place == 0 or token in ids}
        for candidates in entries
    ]


def prompt_logprobs_of(entries: Sequence[dict[int, Logprob] | None] | None) -> list[dict[str, Any] | None] | None:
    """Return the log-probabilities of a prompt in vLLM's form."""
    if entries is None:
        return None
    return [
        None
        if candidates is None
        else {
            str(token): {"logprob": finite(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token, entry in candidates.items()
        }
        for candidates in entries
    ]


def finite(entry: Logprob) -> float:
    """Return a log-probability that JSON can hold."""
    return max(LEAST_LOGPROB, entry.logprob)  # in this order a NaN gives the bound too


def error_body(message: str, kind: str, parameter: str | None, reason: str) -> dict[str, dict[str, Any]]:
    """Return OpenAI's form of an error."""
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code_of(reason)}}


def error_body_of(error: BaseException) -> dict[str, dict[str, Any]]:
    """Return what a client reads of an exception."""
    row = row_of(error)
    parameter = error.parameter if isinstance(error, UserError) else None
    return error_body(message_of(error), row.kind, parameter, row.reason)


def model_card(name: str, root: str, created: int, max_model_len: int, parent: str | None = None) -> dict[str, Any]:
    """Return what the API says about a served name.

    `root` is the model as the server was started with it, as vLLM has it: a client on the same machine finds the
    tokenizer there. Of an adapter it is where that was loaded from, and `parent` the model's name. `created` is in
    seconds since 1970.
    """
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "jaxllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [],
    }


def model_list(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the cards of all served names."""
    return {"object": "list", "data": cards}
