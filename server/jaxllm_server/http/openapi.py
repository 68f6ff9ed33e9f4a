"""Build the OpenAPI 3.1 document from routes, bodies' fields and `SamplingParams`' help texts. Pure.

`SHAPES` has the fields' schemas, `Body.shapes` single bodies'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields as fields_of
from typing import Any

from jaxllm.sampling_params import SamplingParams
from jaxllm_server.anthropic.replies import MessagesReply
from jaxllm_server.http.guard import ADMIN_PATHS, OPEN_PATHS
from jaxllm_server.http.routes import JSON, ApiRoute, Body
from jaxllm_server.http.schemas import FLAG, IDLE, IDS, INTEGER, NUMBER, OBJECT, PROMPTS, STRINGS, TEXT, Schema
from jaxllm_server.ollama.replies import OllamaChatReply, OllamaGenerateReply
from jaxllm_server.openai import tokens
from jaxllm_server.openai.chat import ChatReply
from jaxllm_server.openai.chats import ChatsReply
from jaxllm_server.openai.completions import CompletionReply
from jaxllm_server.requests.shared_fields import SAMPLING, WITHOUT_EFFECT
from jaxllm_server.responses.compaction import CompactionReply
from jaxllm_server.responses.reply import ResponseReply

API_VERSION = "1"  # of the paths, not the server
_OBJECTS: Schema = {"type": "array", "items": OBJECT}
_TEXT_OR_TEXTS: Schema = {"anyOf": [TEXT, STRINGS]}
_EITHER: Schema = {"anyOf": [TEXT, OBJECT]}
_FLAG_OR_TEXT: Schema = {"anyOf": [FLAG, TEXT]}
_COUNT: Schema = {"anyOf": [INTEGER, FLAG]}  # true is 1, as in vLLM
_CONVERSATION: Mapping[str, Schema] = {
    **{"input": {"anyOf": [TEXT, _OBJECTS]}, "max_output_tokens": INTEGER, "include": STRINGS},
    **dict.fromkeys(("metadata", "text", "reasoning"), OBJECT),
    **dict.fromkeys(("instructions", "previous_response_id"), TEXT),
    **{"background": FLAG, "truncation": {"type": "string", "enum": ["auto", "disabled"]}},
}
_MESSAGE = {"role": "user", "content": "What is the capital of France?"}
BODIES: Mapping[str, Body] = {
    "/v1/chat/completions": Body.of(
        ChatReply,
        "ChatCompletion",
        "Answer a conversation.",
        ("messages",),
        {"messages": [_MESSAGE], "temperature": 0},
        streams=True,
        shapes={"logprobs": FLAG},
    ),
    "/v1/chat/completions/batch": Body.of(
        ChatsReply,
        "Chats",
        "Answer several conversations, each in a choice of its own.",
        ("messages",),
        {"messages": [[_MESSAGE], [{"role": "user", "content": "And that of Spain?"}]], "temperature": 0},
        shapes={"logprobs": FLAG, "messages": {"type": "array", "items": _OBJECTS}},
    ),
    "/v1/completions": Body.of(
        CompletionReply,
        "Completion",
        "Continue one or more prompts.",
        ("prompt",),
        {"prompt": "Once upon a time", "max_tokens": 32},
        streams=True,
        shapes={"logprobs": _COUNT},
    ),
    "/tokenize": Body(
        "Tokenize",
        "Turn a text (`prompt`) or a conversation (`messages`) into token ids.",
        tokens.TEXT_FIELDS | tokens.CHAT_FIELDS,
        (),
        {"prompt": "Once upon a time"},
        shapes={"prompt": TEXT},
    ),
    "/detokenize": Body(
        "Detokenize", "Turn token ids into text.", tokens.DETOKENIZE_FIELDS, ("tokens",), {"tokens": [1, 2, 3]}
    ),
    "/v1/responses": Body.of(
        ResponseReply,
        "Response",
        "Answer a conversation, in the form of OpenAI's Responses API.",
        ("input",),
        {"input": "What is the capital of France?"},
        streams=True,
        shapes=_CONVERSATION,
    ),
    "/v1/responses/input_tokens": Body.of(
        ResponseReply,
        "InputTokens",
        "Count the tokens of such a conversation.",
        ("input",),
        {"input": "What is the capital of France?"},
        shapes=_CONVERSATION,
    ),
    "/v1/responses/compact": Body.of(
        CompactionReply,
        "Compaction",
        "Sum up such a conversation.",
        ("model",),
        {"model": "jaxllm-embedded", "input": "We meet on Tuesday."},
        shapes=_CONVERSATION,
    ),
    "/v1/messages": Body.of(
        MessagesReply,
        "Messages",
        "Answer a conversation, in Anthropic's form.",
        ("messages", "max_tokens"),
        {"messages": [_MESSAGE], "max_tokens": 32},
        streams=True,
    ),
    "/v1/messages/count_tokens": Body.of(
        MessagesReply,
        "CountTokens",
        "Count the tokens of such a conversation.",
        ("messages",),
        {"messages": [_MESSAGE]},
        shapes={"time_limit": {}},
    ),
    "/api/chat": Body.of(
        OllamaChatReply,
        "OllamaChat",
        "Answer a conversation, in Ollama's form.",
        ("messages",),
        {"messages": [_MESSAGE], "stream": False},
        shapes={"think": _FLAG_OR_TEXT},
    ),
    "/api/generate": Body.of(
        OllamaGenerateReply,
        "OllamaGenerate",
        "Answer a text, in Ollama's form.",
        ("prompt",),
        {"prompt": "Once upon a time", "stream": False},
        shapes={"think": _FLAG_OR_TEXT},
    ),
}

_SOCKETS = ("/v1/responses",)
_OTHER_FORMS = ("/v1/messages", "/api/")  # with other errors than OpenAI's
_ERROR_REFERENCE = {"$ref": "#/components/schemas/Error"}
# By annotation of `SamplingParams` without "| None".
_BY_ANNOTATION: Mapping[str, Schema] = {
    "int": INTEGER,
    "float": NUMBER,
    "bool": FLAG,
    "Sequence[int]": IDS,
    "Sequence[str]": STRINGS,
    "Mapping[int, float]": {"type": "object", "additionalProperties": NUMBER},
    "RepetitionDetectionParams": OBJECT,
}
# Fields that `SamplingParams` lacks, or with more types.
SHAPES: Mapping[str, Schema] = {
    **dict.fromkeys(("model", "request_id", "cache_salt", "reasoning_effort", "suffix"), TEXT),
    **dict.fromkeys(("stream", "echo", "add_special_tokens", "return_token_ids", "use_beam_search"), FLAG),
    **dict.fromkeys(("return_tokens_as_token_ids", "add_generation_prompt", "continue_final_message"), FLAG),
    **dict.fromkeys(("parallel_tool_calls", "include_reasoning", "return_token_strs"), FLAG),
    **dict.fromkeys(("priority", "best_of", "max_completion_tokens", "top_logprobs"), INTEGER),
    "truncate_prompt_tokens": INTEGER,
    **dict.fromkeys(("length_penalty", "time_limit"), NUMBER),
    **dict.fromkeys(("stream_options", "vllm_xargs", "chat_template_kwargs", "structured_outputs"), OBJECT),
    **dict.fromkeys(("response_format", "prediction", "kv_transfer_params", "mm_processor_kwargs"), OBJECT),
    "verbosity": {"type": "string", "enum": ["low", "medium", "high"]},
    **dict.fromkeys(("messages", "tools"), _OBJECTS),
    "thinking": OBJECT,
    "enable_thinking": FLAG,
    "think": {"anyOf": [FLAG, {"type": "string", "enum": ["low", "medium", "high"]}]},
    "tool_choice": _EITHER,
    "stop": _TEXT_OR_TEXTS,
    **dict.fromkeys(("tokens", "prompt_token_ids"), IDS),
    "prompt": PROMPTS,
    "truncation_side": {"type": "string", "enum": ["left", "right"]},
    "early_stopping": {"anyOf": [FLAG, {"const": "never"}]},
    **dict.fromkeys(("guided_regex", "guided_grammar", "guided_whitespace_pattern"), TEXT),
    "guided_choice": STRINGS,
    "guided_json": {"anyOf": [TEXT, OBJECT, FLAG]},
    "prompt_logprobs": _COUNT,
}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": TEXT,
                "type": TEXT,
                "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                "code": TEXT,
            },
        }
    },
}


def description_of(routes: Iterable[ApiRoute], root_path: str = "") -> dict[str, Any]:
    """Return the OpenAPI document; `root_path` is a proxy's prefix."""
    paths: dict[str, dict[str, Any]] = {}
    schemas = {"Error": _ERROR}
    for route in routes:
        for method in route.methods:
            paths.setdefault(route.name, {})[method.lower()] = _operation(route, method)
        schemas |= {body.name: _schema(body) for body in route.bodies}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxllm", "version": API_VERSION, "description": "OpenAI's API, and vLLM's beyond it."},
        "servers": [{"url": root_path.rstrip("/") or "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: ApiRoute, method: str) -> dict[str, Any]:
    path, bodies = route.name, route.bodies
    content: dict[str, Any] = {media: {} if media == JSON else {"schema": TEXT} for media in route.media}
    if any(body.streams for body in bodies) and len(bodies) == 1:
        content["text/event-stream"] = {"schema": TEXT}
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}",
        "summary": bodies[0].summary if len(bodies) == 1 else (route.run.__doc__ or "").partition("\n")[0],
        "responses": {
            "200": {"description": "The answer."} | ({"content": content} if content else {}),
            "default": {
                "description": "What was wrong.",
                "content": {"application/json": {} if path.startswith(_OTHER_FORMS) else {"schema": _ERROR_REFERENCE}},
            },
        },
        "security": [] if path.encode() in OPEN_PATHS else [{"key": []}, {}],
    }
    if method == "GET" and path in _SOCKETS:
        operation["responses"]["101"] = {"description": "The connection is a WebSocket from here on."}
        operation["description"] = "Each message is a body of POST, with `type` as `response.create`."
        del operation["responses"]["200"]
    if path in ADMIN_PATHS:
        operation["description"] = "Needs the admin key, where there is one."
    names = [part.strip("{}") for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in names]
    if path == "/drain":
        parameters.append({"name": "replica", "in": "query", "required": True, "schema": INTEGER})
    if parameters:
        operation["parameters"] = parameters
    if bodies:
        references = [{"$ref": f"#/components/schemas/{body.name}"} for body in bodies]
        schema = references[0] if len(bodies) == 1 else {"anyOf": references}
        taken = {"schema": schema, "example": bodies[0].example}
        operation["requestBody"] = {"required": True, "content": {bodies[0].media: taken}}
    return operation


def _schema(body: Body) -> Schema:
    properties = {name: schema for name in sorted(body.fields) if (schema := _property(body, name)) is not None}
    return {"type": "object", "required": list(body.required), "properties": properties}


def _property(body: Body, name: str) -> Schema | None:
    """Return a field's schema, which includes null; None if no value is accepted."""
    unbuilt = {**_UNBUILT, **body.unbuilt}
    if name in unbuilt:
        accepted = list(unbuilt[name])
        return (
            {"enum": [*accepted, None], "description": "Not built: these values ask for nothing."} if accepted else None
        )
    if name in WITHOUT_EFFECT and name not in body.shapes:
        return IDLE
    if name == "chat_template":  # only `--chat-template` sets it
        return None
    own = _SAMPLING.get(name, {}) if body.streams or body.fields is ChatsReply.fields else {}
    shape = body.shapes.get(name, SHAPES.get(name, own))
    described = {"description": own["description"]} if "description" in own else {}
    return _or_null(shape) | described


def _or_null(shape: Schema) -> Schema:
    if "enum" in shape:
        return shape | {"type": [shape["type"], "null"], "enum": [*shape["enum"], None]}
    if "type" in shape:
        return shape | {"type": [shape["type"], "null"]}
    return {"anyOf": [*shape["anyOf"], {"type": "null"}]} if "anyOf" in shape else shape


def _of_sampling() -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for parameter in fields_of(SamplingParams):
        if parameter.name in SAMPLING:
            shape = _BY_ANNOTATION.get(str(parameter.type).removesuffix(" | None"), {})
            help_text = parameter.metadata["help"] or ""
            for of_flags in (" (with --json)", "; may be repeated"):
                help_text = help_text.replace(of_flags, "")
            found[parameter.name] = shape | ({"description": help_text} if help_text else {})
    return found


_SAMPLING = _of_sampling()
_UNBUILT: Mapping[str, tuple[Any, ...]] = {
    name: (default,) if (default := getattr(SamplingParams, name, None)) is not None else ()
    for name in SAMPLING - {own.name for own in fields_of(SamplingParams)}
}
