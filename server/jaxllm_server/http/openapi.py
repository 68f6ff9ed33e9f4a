"""The description of the HTTP API, OpenAPI 3.1: made of the routes, of the fields that their bodies may have, and of
what `SamplingParams` says of them.

Pure. What is written here and nowhere else is the shape of each field; a test holds it against what is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields as fields_of
from typing import Any, NamedTuple, get_args

from starlette.routing import Route

from jaxllm.pooling_params import PoolingTask
from jaxllm.sampling_params import SamplingParams
from jaxllm_server.anthropic.messages import MessagesReply
from jaxllm_server.http.guard import ADMIN_PATHS, OPEN_PATHS
from jaxllm_server.ollama.models import SHOW_FIELDS
from jaxllm_server.ollama.replies import OllamaChatReply, OllamaEmbedReply, OllamaGenerateReply
from jaxllm_server.openai import adapters, tokens
from jaxllm_server.openai.chat import ChatReply
from jaxllm_server.openai.chats import ChatsReply
from jaxllm_server.openai.completions import CompletionReply
from jaxllm_server.openai.pooling import REPLIES
from jaxllm_server.requests.shared_fields import SAMPLING, WITHOUT_EFFECT
from jaxllm_server.responses.compaction import CompactionReply
from jaxllm_server.responses.reply import ResponseReply

Schema = dict[str, Any]
API_VERSION = "1"  # of the paths; the server's own is at /version, for those who have a key


class Body(NamedTuple):
    """What a route takes."""

    name: str  # of its schema
    summary: str
    fields: Collection[str]
    unbuilt: Mapping[str, tuple[Any, ...]]  # those that do nothing here, with the values that are accepted
    required: tuple[str, ...]
    example: Mapping[str, Any]
    streams: bool = False


_MESSAGE = {"role": "user", "content": "What is the capital of France?"}
_TEXTS = {"input": ["Who keeps bees?", "Anna is a beekeeper."]}
BODIES: Mapping[str, Body] = {
    "/v1/chat/completions": Body(
        "ChatCompletion",
        "Answer a conversation.",
        ChatReply.fields,
        ChatReply.unbuilt,
        ("messages",),
        {"messages": [_MESSAGE], "temperature": 0},
        streams=True,
    ),
    "/v1/chat/completions/batch": Body(
        "Chats",
        "Answer several conversations, each in a choice of its own.",
        ChatsReply.fields,
        ChatsReply.unbuilt,
        ("messages",),
        {"messages": [[_MESSAGE], [{"role": "user", "content": "And that of Spain?"}]], "temperature": 0},
    ),
    "/v1/completions": Body(
        "Completion",
        "Continue one or more prompts.",
        CompletionReply.fields,
        CompletionReply.unbuilt,
        ("prompt",),
        {"prompt": "Once upon a time", "max_tokens": 32},
        streams=True,
    ),
    **{
        path: Body(name, summary, reply.fields, reply.unbuilt, required, example)
        for paths, name, summary, required, example in (
            (("/v1/embeddings",), "Embedding", "Return the vectors of texts.", ("input",), _TEXTS),
            (("/pooling",), "Pooling", "Do what the model does with texts, or what `task` says.", ("input",), _TEXTS),
            (("/classify",), "Classification", "Classify texts.", ("input",), _TEXTS),
            (
                ("/score", "/v1/score"),
                "Score",
                "Score one text with each of others, or each with the one in its place.",
                (),
                {"text_1": "Who keeps bees?", "text_2": ["Anna is a beekeeper.", "Ben bakes bread."]},
            ),
            (
                ("/rerank", "/v1/rerank", "/v2/rerank"),
                "Rerank",
                "Order documents by how well they belong to a query.",
                ("query", "documents"),
                {"query": "Which animal barks?", "documents": ["A banana is yellow.", "A dog barks."]},
            ),
        )
        for path in paths
        for reply in (REPLIES[path],)
    },
    "/tokenize": Body(
        "Tokenize",
        "Turn a text (`prompt`) or a conversation (`messages`) into token ids.",
        tokens.TEXT_FIELDS | tokens.CHAT_FIELDS,
        {},
        (),
        {"prompt": "Once upon a time"},
    ),
    "/detokenize": Body(
        "Detokenize", "Turn token ids into text.", tokens.DETOKENIZE_FIELDS, {}, ("tokens",), {"tokens": [1, 2, 3]}
    ),
    "/v1/responses": Body(
        "Response",
        "Answer a conversation, in the form of OpenAI's Responses API.",
        ResponseReply.fields,
        ResponseReply.unbuilt,
        ("input",),
        {"input": "What is the capital of France?"},
        streams=True,
    ),
    "/v1/responses/input_tokens": Body(
        "InputTokens",
        "Count the tokens of such a conversation.",
        ResponseReply.fields,
        ResponseReply.unbuilt,
        ("input",),
        {"input": "What is the capital of France?"},
    ),
    "/v1/responses/compact": Body(
        "Compaction",
        "Sum up such a conversation.",
        CompactionReply.fields,
        CompactionReply.unbuilt,
        ("model",),
        {"model": "jaxllm-embedded", "input": "We meet on Tuesday."},
    ),
    "/v1/messages": Body(
        "Messages",
        "Answer a conversation, in Anthropic's form.",
        MessagesReply.fields,
        MessagesReply.unbuilt,
        ("messages", "max_tokens"),
        {"messages": [_MESSAGE], "max_tokens": 32},
        streams=True,
    ),
    "/v1/messages/count_tokens": Body(
        "CountTokens",
        "Count the tokens of such a conversation.",
        MessagesReply.fields,
        MessagesReply.unbuilt,
        ("messages",),
        {"messages": [_MESSAGE]},
    ),
    "/api/chat": Body(
        "OllamaChat",
        "Answer a conversation, in Ollama's form.",
        OllamaChatReply.fields,
        OllamaChatReply.unbuilt,
        ("messages",),
        {"messages": [_MESSAGE], "stream": False},
    ),
    "/api/generate": Body(
        "OllamaGenerate",
        "Answer a text, in Ollama's form.",
        OllamaGenerateReply.fields,
        OllamaGenerateReply.unbuilt,
        ("prompt",),
        {"prompt": "Once upon a time", "stream": False},
    ),
    "/api/embed": Body(
        "OllamaEmbed",
        "Return the vectors of texts, in Ollama's form.",
        OllamaEmbedReply.fields,
        OllamaEmbedReply.unbuilt,
        ("input",),
        _TEXTS,
    ),
    "/api/show": Body(
        "OllamaShow",
        "Describe a served name as Ollama does.",
        SHOW_FIELDS,
        {},
        ("model",),
        {"model": "jaxllm-embedded"},
    ),
    "/v1/load_lora_adapter": Body(
        "LoadAdapter",
        "Load an adapter under a name.",
        adapters.LOAD_FIELDS,
        adapters.UNBUILT,
        ("lora_name", "lora_path"),
        {"lora_name": "poet", "lora_path": "poet"},
    ),
    "/v1/unload_lora_adapter": Body(
        "UnloadAdapter",
        "Take an adapter away.",
        adapters.UNLOAD_FIELDS,
        {},
        ("lora_name",),
        {"lora_name": "poet"},
    ),
}

_SOCKETS = ("/v1/responses",)  # paths where GET begins a WebSocket
_EMPTY = ("/health", "/live", "/ping")  # answers without a body
_OTHER_FORMS = ("/v1/messages", "/api/")  # than OpenAI's, of errors too
_ERROR_REFERENCE = {"$ref": "#/components/schemas/Error"}
_INTEGER, _NUMBER, _FLAG, _TEXT = ({"type": kind} for kind in ("integer", "number", "boolean", "string"))
_OBJECT: Schema = {"type": "object"}
_IDS: Schema = {"type": "array", "items": _INTEGER}
_STRINGS: Schema = {"type": "array", "items": _TEXT}
_OBJECTS: Schema = {"type": "array", "items": _OBJECT}
_TEXT_OR_TEXTS: Schema = {"anyOf": [_TEXT, _STRINGS]}
_PROMPTS: Schema = {"anyOf": [_TEXT, _STRINGS, _IDS, {"type": "array", "items": _IDS}]}
_DOCUMENTS: Schema = {"anyOf": [_TEXT, _OBJECT, {"type": "array", "items": {"anyOf": [_TEXT, _OBJECT]}}]}
_EITHER: Schema = {"anyOf": [_TEXT, _OBJECT]}
_FLAG_OR_TEXT: Schema = {"anyOf": [_FLAG, _TEXT]}
_COUNT: Schema = {"anyOf": [_INTEGER, _FLAG]}  # true is 1, as in vLLM
# A field of `SamplingParams` by its annotation, without "| None".
_BY_ANNOTATION: Mapping[str, Schema] = {
    "int": _INTEGER,
    "float": _NUMBER,
    "bool": _FLAG,
    "Sequence[int]": _IDS,
    "Sequence[str]": _STRINGS,
    "Mapping[int, float]": {"type": "object", "additionalProperties": _NUMBER},
    "RepetitionDetectionParams": _OBJECT,
}
# Those of requests alone, and where bodies take more than `SamplingParams`.
SHAPES: Mapping[str, Schema] = {
    **dict.fromkeys(("model", "request_id", "cache_salt", "reasoning_effort", "suffix"), _TEXT),
    **dict.fromkeys(("lora_name", "lora_path"), _TEXT),
    **dict.fromkeys(("stream", "echo", "add_special_tokens", "return_token_ids", "use_beam_search"), _FLAG),
    **dict.fromkeys(("return_tokens_as_token_ids", "add_generation_prompt", "continue_final_message"), _FLAG),
    **dict.fromkeys(("parallel_tool_calls", "include_reasoning", "return_token_strs", "return_documents"), _FLAG),
    **dict.fromkeys(("normalize", "use_activation", "load_inplace"), _FLAG),
    **dict.fromkeys(("priority", "best_of", "max_completion_tokens", "top_logprobs", "dimensions", "top_n"), _INTEGER),
    "truncate_prompt_tokens": _INTEGER,
    **dict.fromkeys(("length_penalty", "time_limit"), _NUMBER),
    **dict.fromkeys(("stream_options", "vllm_xargs", "chat_template_kwargs", "structured_outputs"), _OBJECT),
    **dict.fromkeys(("response_format", "prediction"), _OBJECT),
    "verbosity": {"type": "string", "enum": ["low", "medium", "high"]},
    **dict.fromkeys(("messages", "tools"), _OBJECTS),
    "thinking": _OBJECT,
    "enable_thinking": _FLAG,
    "think": {"anyOf": [_FLAG, {"type": "string", "enum": ["low", "medium", "high"]}]},
    "tool_choice": _EITHER,
    "stop": _TEXT_OR_TEXTS,
    **dict.fromkeys(("tokens", "prompt_token_ids"), _IDS),
    **dict.fromkeys(("prompt", "input"), _PROMPTS),
    **dict.fromkeys(("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2", "query"), _DOCUMENTS),
    "encoding_format": {"type": "string", "enum": ["float", "base64"]},
    "task": {"type": "string", "enum": list(get_args(PoolingTask))},
    "truncation_side": {"type": "string", "enum": ["left", "right"]},
    "early_stopping": {"anyOf": [_FLAG, {"const": "never"}]},
    **dict.fromkeys(("guided_regex", "guided_grammar", "guided_whitespace_pattern"), _TEXT),
    "guided_choice": _STRINGS,
    "guided_json": {"anyOf": [_TEXT, _OBJECT, _FLAG]},
    "prompt_logprobs": _COUNT,
}
_CONVERSATIONS: Schema = {"type": "array", "items": _OBJECTS}
_OF_ROUTES: Mapping[tuple[str, str], Schema] = {
    ("ChatCompletion", "logprobs"): _FLAG,
    **{("Chats", name): shape for name, shape in (("logprobs", _FLAG), ("messages", _CONVERSATIONS))},
    ("Completion", "logprobs"): _COUNT,
    ("Tokenize", "prompt"): _TEXT,
    ("CountTokens", "time_limit"): {},
    **{
        (body, name): shape
        for body in ("Response", "InputTokens", "Compaction")
        for name, shape in {
            **{"input": {"anyOf": [_TEXT, _OBJECTS]}, "max_output_tokens": _INTEGER, "include": _STRINGS},
            **dict.fromkeys(("metadata", "text", "reasoning"), _OBJECT),
            **dict.fromkeys(("instructions", "previous_response_id"), _TEXT),
            **{"background": _FLAG, "truncation": {"type": "string", "enum": ["auto", "disabled"]}},
        }.items()
    },
    ("OllamaChat", "think"): _FLAG_OR_TEXT,
    ("OllamaGenerate", "think"): _FLAG_OR_TEXT,
}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                "code": _TEXT,
            },
        }
    },
}


def description_of(routes: Iterable[Route], root_path: str = "") -> dict[str, Any]:
    """Return the document for these routes; `root_path` is the prefix under which a proxy has them."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":path", "")
        operations = paths.setdefault(path, {})
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operations[method.lower()] = _operation(path, method, (route.endpoint.__doc__ or "").partition("\n")[0])
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxllm", "version": API_VERSION, "description": "OpenAI's API, and vLLM's beyond it."},
        "servers": [{"url": root_path.rstrip("/") or "/"}],
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR, **{body.name: _schema(body) for body in BODIES.values()}},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, method: str, summary: str) -> dict[str, Any]:
    body = BODIES.get(path) if method == "POST" else None
    content: dict[str, Any] = {"application/json": {}}
    if path in ("/", "/docs", "/metrics") or path.endswith("_lora_adapter"):
        content = {"text/html" if path in ("/", "/docs") else "text/plain": {"schema": _TEXT}}
    if path in ("/api/chat", "/api/generate"):
        content["application/x-ndjson"] = {"schema": _TEXT}
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}",
        "summary": summary if body is None else body.summary,
        "responses": {
            "200": {"description": "The answer."} | ({} if path in _EMPTY else {"content": content}),
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
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    if path == "/drain":
        parameters.append({"name": "replica", "in": "query", "required": True, "schema": _INTEGER})
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = _taken(_reference(body), body.example)
    elif path == "/invocations":
        bodies = {BODIES[each].name: BODIES[each] for each in ("/v1/chat/completions", "/v1/completions", *REPLIES)}
        taken = {"anyOf": [_reference(each) for each in bodies.values()]}
        operation["requestBody"] = _taken(taken, BODIES["/v1/chat/completions"].example)
    if body is not None and body.streams:
        content["text/event-stream"] = {"schema": _TEXT}
    return operation


def _taken(schema: Schema, example: Mapping[str, Any]) -> Schema:
    return {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}


def _reference(body: Body) -> Schema:
    return {"$ref": f"#/components/schemas/{body.name}"}


def _schema(body: Body) -> Schema:
    properties = {name: schema for name in sorted(body.fields) if (schema := _property(body, name)) is not None}
    return {"type": "object", "required": list(body.required), "properties": properties}


def _property(body: Body, name: str) -> Schema | None:
    """Return the schema of a field; None for one of which no value is accepted. Null is as good as no field."""
    unbuilt = {**_UNBUILT, **body.unbuilt}
    if name in unbuilt:
        accepted = list(unbuilt[name])
        return (
            {"enum": [*accepted, None], "description": "Not built: these values ask for nothing."} if accepted else None
        )
    if (name in WITHOUT_EFFECT and (body.name, name) not in _OF_ROUTES) or name == "lora_int_id":
        return {"description": "Accepted; it changes nothing."}
    if name == "chat_template":  # refused by name: `--chat-template` is the operator's
        return None
    own = _SAMPLING.get(name, {}) if body.streams or body.fields is ChatsReply.fields else {}
    shape = _OF_ROUTES.get((body.name, name), SHAPES.get(name, own))
    described = {"description": own["description"]} if "description" in own else {}
    return _or_null(shape) | described


def _or_null(shape: Schema) -> Schema:
    """Let a schema take null."""
    if "enum" in shape:
        return shape | {"type": [shape["type"], "null"], "enum": [*shape["enum"], None]}
    if "type" in shape:
        return shape | {"type": [shape["type"], "null"]}
    return {"anyOf": [*shape["anyOf"], {"type": "null"}]} if "anyOf" in shape else shape


def _of_sampling() -> dict[str, Schema]:
    """Return what `SamplingParams` says of its fields that a body may have under the same name."""
    found: dict[str, Schema] = {}
    for own in fields_of(SamplingParams):
        if own.name in SAMPLING:
            shape = _BY_ANNOTATION.get(str(own.type).removesuffix(" | None"), {})
            help_text = own.metadata["help"] or ""
            for of_flags in (" (with --json)", "; may be repeated"):
                help_text = help_text.replace(of_flags, "")
            found[own.name] = shape | ({"description": help_text} if help_text else {})
    return found


_SAMPLING = _of_sampling()
# Sampling parameters that are not built, with their defaults.
_UNBUILT: Mapping[str, tuple[Any, ...]] = {
    name: (default,) if (default := getattr(SamplingParams, name, None)) is not None else ()
    for name in SAMPLING - {own.name for own in fields_of(SamplingParams)}
}
