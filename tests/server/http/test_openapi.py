"""The OpenAPI description has every route and field, and its schemas agree with the server's validation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from jaxllm.errors import UserError
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams
from jaxllm_server.anthropic.replies import MessagesReply, count_call_of
from jaxllm_server.generation.chat_checks import check_tools
from jaxllm_server.http import weight_routes
from jaxllm_server.http.answering import Answering
from jaxllm_server.http.endpoints import Endpoints
from jaxllm_server.http.openapi import description_of
from jaxllm_server.http.routes import JSON
from jaxllm_server.ollama.models import asked_name
from jaxllm_server.ollama.pooling import OllamaEmbedReply
from jaxllm_server.ollama.replies import OllamaChatReply, OllamaGenerateReply
from jaxllm_server.openai import adapters, tokens, weights
from jaxllm_server.openai.audio import TranscriptionReply, TranslationReply
from jaxllm_server.openai.chat import ChatReply
from jaxllm_server.openai.chats import ChatsReply
from jaxllm_server.openai.completions import CompletionReply
from jaxllm_server.openai.generate import GenerateReply
from jaxllm_server.openai.invocations import route_of
from jaxllm_server.openai.pooling import REPLIES
from jaxllm_server.requests.shared_fields import WITHOUT_EFFECT
from jaxllm_server.responses.compaction import CompactionReply
from jaxllm_server.responses.reply import ResponseReply
from jaxllm_server.shared.options import AUDIO_PATHS, ServerOptions
from tests.support.fake_serving import FakeServing, http_server

LORA_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
OPTIONS = ServerOptions(enable_tokenizer_info_endpoint=True)
ROUTES = Endpoints(FakeServing(), OPTIONS, None, None).table
BODIES = {route.name: route.bodies[0] for route in ROUTES if len(route.bodies) == 1}
JSON_BODIES = {path: body for path, body in BODIES.items() if body.media == JSON}
DESCRIPTION = description_of(ROUTES)
# The rules of OpenAPI 3.1 for the parts in use here.
OPENAPI = {
    "type": "object",
    "required": ["openapi", "info", "paths"],
    "properties": {
        "openapi": {"pattern": r"^3\.1\.\d+$"},
        "info": {"required": ["title", "version"]},
        "paths": {"patternProperties": {"^/": {"additionalProperties": {"$ref": "#/$defs/operation"}}}},
        "components": {"required": ["schemas"]},
    },
    "$defs": {
        "operation": {
            "required": ["responses", "operationId"],
            "properties": {
                "operationId": {"pattern": "^[A-Za-z0-9_.-]+$"},
                "parameters": {"items": {"required": ["name", "in", "schema"]}},
                "requestBody": {"required": ["content"]},
                "responses": {"additionalProperties": {"required": ["description"]}, "minProperties": 1},
            },
            "additionalProperties": {"not": {"type": "null"}},
        }
    },
}
WEIGHT_PATHS = {route.name for route in weight_routes.routes(Answering(FakeServing(), OPTIONS, None))}
NO_BODY = {"/drain", "/ping", "/sleep", "/wake_up", "/pause", "/resume", "/start_weight_update"} | {
    *("/v1/responses/{response_id}/cancel", "/invocations")  # the last reads other routes'
}


def references(part: Any) -> Iterator[str]:
    for value in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from references(value)
    if isinstance(part, dict) and "$ref" in part:
        yield part["$ref"]


def test_the_document_is_valid_and_has_every_route() -> None:
    jsonschema.validate(DESCRIPTION, OPENAPI)
    schemas = DESCRIPTION["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert {each.removeprefix("#/components/schemas/") for each in references(DESCRIPTION)} == schemas.keys()
    found = {(method.upper(), path) for path, methods in DESCRIPTION["paths"].items() for method in methods}
    assert found == {(method, route.name) for route in ROUTES for method in route.methods}
    assert {path for method, path in found if method == "POST"} == BODIES.keys() | NO_BODY
    names = [each["operationId"] for methods in DESCRIPTION["paths"].values() for each in methods.values()]
    assert len(names) == len(set(names))
    assert all(each["summary"] for methods in DESCRIPTION["paths"].values() for each in methods.values())


def read(path: str, body: dict[str, Any]) -> None:
    """Read a body with its route's function, parameters included."""
    if path in POOL_REPLIES:
        for call in POOL_REPLIES[path](body, OPTIONS, "id").calls:
            PoolingParams(
                dimensions=call.dimensions,
                normalize=call.normalize,
                use_activation=call.use_activation,
                truncate_prompt_tokens=call.truncate_prompt_tokens,
            )
    elif path in AUDIO_REPLIES:
        if isinstance(body["file"], str):
            body["file"] = body["file"].encode()
        AUDIO_REPLIES[path](body, OPTIONS, "id")
    elif path in TEXT_REPLIES:
        for call in TEXT_REPLIES[path](body, OPTIONS, "id").calls:
            SamplingParams(**call.sampling)
            if call.tools is not None:
                check_tools(call.tools, 1)
            if type(call.time_limit) not in (type(None), int, float):
                raise UserError("It is the engine that refuses this.", "time_limit")
    else:
        {
            "/tokenize": tokens.tokenize_call_of,
            "/detokenize": tokens.detokenize_request_of,
            "/v1/load_lora_adapter": adapters.load_request_of,
            "/v1/unload_lora_adapter": adapters.unload_request_of,
            "/v1/messages/count_tokens": count_call_of,
            "/api/show": asked_name,
            "/init_weight_transfer_engine": weights.init_request_of,
            "/update_weights": weights.update_request_of,
            "/finish_weight_update": weights.finish_request_of,
        }[path](body)


TEXT_REPLIES: dict[str, Any] = {
    "/v1/completions": CompletionReply,
    "/v1/chat/completions": ChatReply,
    "/v1/chat/completions/batch": ChatsReply,
    **dict.fromkeys(("/v1/responses", "/v1/responses/input_tokens"), ResponseReply),
    "/v1/responses/compact": CompactionReply,
    "/v1/messages": MessagesReply,
    "/inference/v1/generate": GenerateReply,
    "/api/chat": OllamaChatReply,
    "/api/generate": OllamaGenerateReply,
}
AUDIO_REPLIES = dict(zip(AUDIO_PATHS, (TranscriptionReply, TranslationReply), strict=True))
POOL_REPLIES = {**REPLIES, "/api/embed": OllamaEmbedReply}
VALUES: list[Any] = [True, 7, 0.5, "§", ["§"], [7], [{}], {"§": 7}]


@pytest.mark.filterwarnings("ignore:a client sent guided_")
@pytest.mark.parametrize("path", BODIES)
def test_what_does_not_fit_a_field_is_refused_and_every_field_is_there(path: str) -> None:
    body = BODIES[path]
    properties = DESCRIPTION["components"]["schemas"][body.name]["properties"]
    jsonschema.validate(body.example, DESCRIPTION["components"]["schemas"][body.name])
    read(path, dict(body.example))
    refused_always = set(body.fields) - properties.keys()
    for name in refused_always:
        for value in VALUES:
            with pytest.raises(UserError):
                read(path, {**body.example, name: value})
    for name, schema in properties.items():
        if not schema.keys() - {"description"}:
            is_described = path.startswith(("/v1/responses", "/v1/messages", "/api/"))  # in the API itself
            assert is_described or name in WITHOUT_EFFECT | {"lora_int_id"}, f"{name} needs a shape"
            continue
        for value in VALUES:
            if jsonschema.Draft202012Validator(schema).is_valid(value):
                continue
            with pytest.raises(UserError) as caught:
                read(path, {**body.example, name: value})
            assert caught.value.parameter is not None, name


def test_the_page_is_whole_and_says_what_the_document_does() -> None:
    with http_server(FakeServing(), ServerOptions(api_key=("k",), root_path="/llm")) as port:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            document, page = http.get("/openapi.json"), http.get("/docs")
    assert document.json() == json.loads(
        json.dumps(
            description_of(
                Endpoints(FakeServing(), ServerOptions(), None, None).table,
                "/llm",
            )
        )
    )
    assert document.json()["servers"] == [{"url": "/llm"}]
    text = page.text
    assert (
        page.headers["content-type"].startswith("text/html")
        and "default-src 'none'" in page.headers["content-security-policy"]
    )
    assert "://" not in text and " src=" not in text, "nothing is fetched from elsewhere"
    shown = set(re.findall(r"<code>(/.*?)</code>", text))
    assert set(document.json()["paths"]) - shown == {"/api/embed", *REPLIES, "/drain", *LORA_PATHS, *WEIGHT_PATHS}
    for name in ("max_completion_tokens", "structured_outputs", "temperature"):
        assert f"<code>{name}</code>" in text


@pytest.mark.parametrize("tasks", [("generate",), ("embed", "score")])
def test_the_pages_show_what_a_server_answers(tasks: tuple[str, ...]) -> None:
    serving = FakeServing(options=ServerOptions(lora_root="/"))
    serving.tasks = tasks
    with http_server(serving, serving.options) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        front, page = http.get("/").text, http.get("/docs").text
    for text in (front, page):
        shown = set(re.findall(r"<code>(/.*?)</code>", text))
        assert ("/v1/chat/completions" in shown) == ("generate" in tasks) != ("/v1/embeddings" in shown)
        assert shown > {"/v1/models", "/tokenize", *LORA_PATHS}
    assert "href=docs" in front


def test_answers_have_a_type_that_is_described() -> None:
    serving = FakeServing(options=ServerOptions(enable_tokenizer_info_endpoint=True))
    posts = [(path, {}) for path in ("/tokenize", "/v1/chat/completions/batch")]
    posts += [
        (path, {"stream": stream}) for path, body in JSON_BODIES.items() if body.streams for stream in (False, True)
    ]
    posts += [(f"/api/{name}", {"stream": stream}) for name in ("chat", "generate") for stream in (False, True)]
    with http_server(serving, serving.options) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        paths = http.get("/openapi.json").json()["paths"]
        gets = [path for path, own in paths.items() if "200" in own.get("get", {}).get("responses", {})]
        gets = [path for path in gets if "{" not in path and path not in {"/metrics", *WEIGHT_PATHS}]
        assert len(gets) > 8
        for path, own in [(path, None) for path in gets] + posts:
            method = "get" if own is None else "post"
            answer = http.request(method, path, json=None if own is None else {**BODIES[path].example, **own})
            described = paths[path][method]["responses"]["200"].get("content", {None: {}})
            found = answer.headers.get("content-type")
            assert answer.status_code == 200 and (found and found.partition(";")[0]) in described, (path, answer.text)


def test_an_api_without_docs() -> None:
    with http_server(FakeServing(), ServerOptions(disable_fastapi_docs=True)) as port:
        for path in ("/docs", "/openapi.json"):
            assert httpx.get(f"http://127.0.0.1:{port}{path}").status_code == 404


INVOCATIONS = [
    ({"messages": []}, ("generate",), "/v1/chat/completions"),
    ({"prompt": "a", "messages": None}, ("generate",), "/v1/completions"),
    ({"input": "a"}, ("embed", "score"), "/v1/embeddings"),
    ({"input": "a"}, ("classify",), "/classify"),
    ({"input": "a"}, ("score",), "/pooling"),
    ({"input": "a", "task": "embed"}, ("embed",), "/pooling"),
    ({"query": "a", "documents": []}, ("score",), "/rerank"),
    ({"text_1": "a", "text_2": "b"}, ("score",), "/score"),
    ({"queries": "a", "items": "b"}, ("score",), "/score"),
]


def test_sagemakers_routes() -> None:
    for body, tasks, path in INVOCATIONS:
        assert route_of(body, tasks) == path
    with pytest.raises(UserError):
        route_of({"model": "fake"}, ("generate",))
    serving = FakeServing()
    with http_server(serving, OPTIONS) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        assert http.get("/ping").status_code == http.post("/ping").status_code == 200
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        assert http.post("/invocations", json=chat).json()["object"] == "chat.completion"
        assert http.post("/invocations", json={"prompt": "Hi"}).json()["object"] == "text_completion"
        assert "data: [DONE]" in http.post("/invocations", json={"prompt": "Hi", "stream": True}).text
        assert http.post("/invocations", json={}).json()["error"]["code"] == "invalid_parameter"
        serving.tasks = ("embed", "score")
        assert http.post("/invocations", json={"input": "Hi"}).json()["data"][0]["object"] == "embedding"
        serving.engine.state = "dead"
        assert http.get("/ping").status_code == 503
        assert http.get("/tokenizer_info").json()["tokenizer_class"] == "PreTrainedTokenizerFast"
    with http_server(serving) as port:
        assert httpx.get(f"http://127.0.0.1:{port}/tokenizer_info").status_code == 404
