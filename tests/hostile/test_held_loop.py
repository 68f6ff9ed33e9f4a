"""No route blocks the event loop for 50 ms, with any large body, stored response or answer.

Routes and fields are those of the server's OpenAPI description. `held_loop.py` measures.
"""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hostile.held_loop import MOST_SECONDS
from tests.support.seq2seq_models import write_whisper
from tests.support.serving_process import QUICK, ServingProcess
from tests.support.sizes import SLOTS, flags

Body = dict[str, Any]
LARGEST = 7_900_000  # bytes of one field
TRIES = 4  # the least of them is used
JSON = {"content-type": "application/json"}
SAID = {"role": "user", "content": "a"}
LEAST: dict[str, Any] = {  # small values of required fields
    **{"prompt": "a", "messages": [SAID], "input": "a", "tokens": [7], "query": "a", "documents": ["a"]},
    **{"lora_name": "a", "lora_path": "a", "model": "a", "max_tokens": 1, "token_ids": [7], "sampling_params": {}},
    **{"init_info": {}, "update_info": {}},
}
LONG = {"max_tokens": 32, "ignore_eos": True}
SAME = ("/v1/score", "/rerank", "/v1/rerank", "/invocations")  # the same code as another route


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    parsers = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with (
        ServingProcess(*QUICK, *parsers, module="tests.hostile.held_loop") as server,
        httpx.Client(base_url=server.http, timeout=120.0) as client,
    ):
        yield client


def held(
    http: httpx.Client, method: str, path: str, body: bytes | None = None, head: Mapping[str, str] = JSON
) -> tuple[httpx.Response, float]:
    """Send a request; return the answer, and the least time, over some tries, that it blocked the loop."""
    least = float("inf")
    for _ in range(TRIES):
        http.get("/held")
        answer = http.request(method, path, content=body, headers=head)
        least = min(least, float(http.get("/held").text))
        if least < MOST_SECONDS:
            break
    return answer, least


def largest(schema: Body) -> Iterator[Any]:
    """Yield large values of each kind in a field's schema."""
    for each in schema.get("anyOf", [schema]):
        kind = each.get("type", "string")
        kind = kind[0] if isinstance(kind, list) else kind
        if kind == "string":
            yield "x" * LARGEST
        elif kind == "object":
            yield {str(number): 1 for number in range(250_000)}
        elif kind == "array" and (inner := each["items"].get("type")) is not None:
            if inner == "integer":
                yield [7] * (LARGEST // 3)
            elif inner == "string":
                yield ["a"] * 250_000
            elif inner == "array":
                yield [[7]] * 130_000
            else:
                yield [SAID] * 80_000
                yield [SAID] * 16_000
                yield [{"role": "user", "content": "x" * LARGEST}]


def tool(**own: Any) -> Body:
    """Return a tool in the forms of all APIs."""
    return {"type": "function", "name": "f", "function": {"name": "f", **own}, **own}


def inner_bodies() -> Iterator[Body]:
    """Yield bodies with large values nested in fields."""
    numbers = {"a": [1] * 1_000_000}
    call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": json.dumps(numbers)}}
    parts = [{"type": "text", "text": "a"}] * 40_000
    used = [{"type": "tool_use", "id": "a", "name": "f", "input": numbers}]
    result = [{"type": "tool_result", "tool_use_id": "a", "content": "x" * 3_000_000}]
    asked = {"type": "function_call", "call_id": "a", "name": "f", "arguments": json.dumps(numbers)}
    told = {"type": "function_call_output", "call_id": "a", "output": "x" * 3_000_000}
    yield {"messages": [SAID, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    yield {"messages": [{"role": "user", "content": parts}]}
    yield {"messages": [SAID, {"role": "assistant", "content": used}, {"role": "user", "content": result}]}
    yield {"input": [{"role": "user", "content": [{**part, "type": "input_text"} for part in parts]}]}
    yield {"input": [asked, told]}
    small, large = (
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(most)}} for most in (7_000, 60_000)
    )
    for said in ({"messages": [SAID]}, {"input": "a"}):
        for parameters in (small, large, {"type": "object", "properties": {"a": {"enum": ["a"] * 150_000}}}):
            yield {**said, "tools": [tool(parameters=parameters, input_schema=parameters)], "tool_choice": "required"}
        yield {**said, "tools": [tool(description="x" * 3_900_000, parameters={"type": "object"})]}
    for schema in (small, large):
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        yield {"messages": [SAID], "response_format": form, "tools": [tool(parameters=small)]}
        yield {"messages": [SAID], "format": schema}
        yield {"input": "a", "text": {"format": {"type": "json_schema", "name": "s", "schema": schema}}}
        yield {"prompt": ["a"] * 512, "response_format": form}
        yield {"prompt": "a", "structured_outputs": {"json": json.dumps(schema)}}
    yield {"prompt": "a", "structured_outputs": {"choice": ["a"] * 250_000}}
    yield {"prompt": ["a"] * 512, "allowed_token_ids": list(range(5, 1500)) * 600}
    yield {"prompt": [[7] * 400] * 512}
    yield {"prompt": ["a " * 1900] * 512}
    yield {"input": ["a " * 1900] * 512}


def bodies(http: httpx.Client, all_fields: bool) -> Iterator[tuple[str, str, bytes]]:
    """Yield routes, names and bodies; without `all_fields`, of required fields only, and each body for one route."""
    description, inner = http.get("/openapi.json").json(), list(inner_bodies())
    seen: set[str] = set()
    for path, operations in description["paths"].items():
        taken = operations.get("post", {}).get("requestBody")
        if taken is None or path in SAME or "application/json" not in taken["content"]:  # forms are below
            continue
        name = taken["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        schema = description["components"]["schemas"][name]
        least = {name: LEAST[name] for name in schema["required"]}
        least = least or ({"prompt": "a"} if path == "/tokenize" else {"text_1": "a", "text_2": "a"})
        for field, own in schema["properties"].items():
            if all_fields or (field in least and field not in seen):
                given = {} if {*least, field} == {"prompt", "messages"} else least
                yield from ((path, field, json.dumps(given | {field: value}).encode()) for value in largest(own))
                seen.add(field)
        for number, body in enumerate(inner):
            if body.keys() <= schema["properties"].keys() and (all_fields or str(number) not in seen):
                given = {} if {*least, *body} >= {"prompt", "messages"} else least
                yield path, f"within {', '.join(body)}", json.dumps(given | body).encode()
                seen.add(str(number))
    yield "/v1/completions", "fields that there are not", json.dumps({f"x{n}": 1 for n in range(250_000)}).encode()
    yield "/v1/completions", "no JSON", b'{"prompt":' + b"[" * LARGEST


def check_bodies(http: httpx.Client, all_fields: bool) -> None:
    over: dict[tuple[str, str, int], float] = {}
    for path, name, body in bodies(http, all_fields):
        answer, seconds = held(http, "POST", path, body)
        assert answer.status_code < 500, (path, name, answer.text)
        if seconds >= MOST_SECONDS:
            over[path, name, len(body)] = seconds
    assert not over


@pytest.mark.ci
def test_no_body_holds_the_loop(http: httpx.Client) -> None:
    check_bodies(http, all_fields=False)


@pytest.mark.slow
def test_no_field_of_any_route_holds_the_loop(http: httpx.Client) -> None:
    check_bodies(http, all_fields=True)


@pytest.mark.ci
def test_nothing_that_is_stored_holds_the_loop(http: httpx.Client) -> None:
    """A chain of seven stored responses of 55 MB, all failed, because their input exceeds the context."""
    previous, over = None, {}

    def check(name: str, method: str, path: str, body: Body | None = None) -> httpx.Response:
        answer, seconds = held(http, method, path, None if body is None else json.dumps(body).encode())
        if seconds >= MOST_SECONDS:
            over[name] = seconds
        return answer

    items = [{"role": "user", "content": [{"type": "input_text", "text": "x" * 7_700}]}] * 1000
    for _ in range(7):
        asked = {"input": items, "previous_response_id": previous, "background": True}
        created = http.post("/v1/responses", json=asked)
        assert created.status_code == 200, created.text
        previous = created.json()["id"]
        while http.get(f"/v1/responses/{previous}").json()["status"] in ("queued", "in_progress"):
            pass
    path = f"/v1/responses/{previous}"
    for query in ("", "?limit=1", "?limit=100&order=asc", f"?after={previous}"):
        assert check(f"input_items{query}", "GET", f"{path}/input_items{query}").status_code in (200, 400)
    assert check("retrieve", "GET", path).json()["status"] == "failed"
    check("cancel", "POST", f"{path}/cancel", {})
    check("go on", "POST", "/v1/responses", {"input": "a", "previous_response_id": previous})
    check("count", "POST", "/v1/responses/input_tokens", {"input": "a", "previous_response_id": previous})
    check("delete", "DELETE", path)
    tools = [{"type": "function", "name": "f", "description": "x" * 60_000}] * 128
    asked = {"input": "a", "tools": tools, "tool_choice": "none", "background": True, "max_output_tokens": 400}
    created = check("tools", "POST", "/v1/responses", asked)
    assert created.status_code == 200, created.text
    own = created.json()["id"]
    check("retrieve early", "GET", f"/v1/responses/{own}")
    check("cancel early", "POST", f"/v1/responses/{own}/cancel", {})
    assert not over


@pytest.mark.slow
def test_no_answer_holds_the_loop(http: httpx.Client) -> None:
    """Answers of hundreds of thousands of log-probabilities, whole and as events."""
    ids = [7 + number % 1000 for number in range(400)]
    over = {}
    for name, path, asked in (
        ("echo", "/v1/completions", {"prompt": ids, "n": 100, "echo": True, "logprobs": 20, "max_tokens": 1}),
        ("prompts", "/v1/completions", {"prompt": [ids] * 40, "echo": True, "logprobs": 20, "max_tokens": 1}),
        ("chat", "/v1/chat/completions", {"messages": [SAID], "n": 64, "logprobs": True, "top_logprobs": 20, **LONG}),
        ("ids", "/v1/completions", {"prompt": [ids] * 500, "return_token_ids": True, "max_tokens": 1}),
    ):
        for stream in (False, True):
            body = json.dumps(
                {**asked, "stream": stream, "ignore_eos": True, "max_tokens": 1 if "echo" in asked else 64}
            )
            answer, seconds = held(http, "POST", path, body.encode())
            assert answer.status_code == 200, answer.text
            if seconds >= MOST_SECONDS:
                over[name, stream] = seconds
    assert not over


@pytest.mark.ci
def test_no_file_of_sound_holds_the_loop(tmp_path: Path) -> None:
    """The largest forms: files at the highest rates, many parts, no boundary; the sound is of some windows."""
    model = str(write_whisper(tmp_path / "whisper"))
    command = (*flags(SLOTS), "--model", model)
    with (
        ServingProcess(*command, module="tests.hostile.held_loop") as server,
        httpx.Client(base_url=server.http, timeout=120.0) as client,
    ):
        part = b'\r\n--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b'
        over = {}
        sounds = {
            "loud": wav(384_000, 32, 4, 25_900_000),
            "odd": wav(383_999, 1, 1, 383_999),
            "nothing": b"x" * 25_900_000,
            "boundaries": b"\r\n--" * 5_000_000,
        }
        forms = {name: part % (b"file", b'; filename="a"', each) for name, each in sounds.items()}
        forms["texts"] = b"".join(part % (b"prompt", b"", b"x" * 65_000) for _ in range(60))
        head = {"content-type": "multipart/form-data; boundary=b"}
        for name, form in forms.items():
            body = form[2:] + b"\r\n--b--\r\n"
            for _ in range(3):  # other processes of this machine can only lengthen it
                answer, seconds = held(client, "POST", "/v1/audio/transcriptions", body, head)
                assert answer.status_code in (200, 400), (name, answer.text)
                if seconds < MOST_SECONDS:
                    break
            else:
                over[name, answer.status_code] = seconds
        assert not over


def wav(rate: int, channels: int, size: int, num_bytes: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(channels)
        written.setsampwidth(size)
        written.setframerate(rate)
        written.writeframes(bytes(range(256)) * (num_bytes // 256))
    return file.getvalue()
