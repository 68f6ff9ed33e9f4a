"""Sounds over HTTP and gRPC: equal answers in every form, also by the openai client, and errors that name the part."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from jaxllm.client import Client
from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm_server.shared.options import ServerOptions
from tests.support.server_thread import ServerThread
from tests.support.sizes import SLOTS
from tests.support.sound_models import wav, write_sound_model

pytestmark = pytest.mark.ci
MODEL = "listener"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    folder = write_sound_model(tmp_path_factory.mktemp("sound"))
    config = EngineConfig(model=str(folder), limit_mm_per_prompt={"audio": 2}, **SLOTS)
    site = ServerThread(config, ServerOptions(port=0, grpc_port=0, served_model_name=(MODEL,)))
    yield site
    site.close()


def stored(seed: int) -> str:
    return base64.b64encode(wav(seed)).decode()


def inline(data: Any, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": form}}


def post(site: ServerThread, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    answer = httpx.post(f"{site.url}{path}", json={"model": MODEL} | body, timeout=60)
    return answer.status_code, answer.json()


def chat(site: ServerThread, *parts: dict[str, Any]) -> tuple[int, Any]:
    content = [*parts, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
    return post(site, "/v1/chat/completions", body)


def test_a_sound_gives_the_same_answer_in_every_form(site: ServerThread) -> None:
    data = stored(3)
    status, answer = chat(site, inline(data))
    assert status == 200, answer
    text = answer["choices"][0]["message"]["content"]
    assert answer["usage"]["prompt_tokens"] > 16
    assert chat(site, inline(stored(4)))[1]["choices"][0]["message"]["content"] != text
    url = f"data:audio/wav;base64,{data}"
    status, answer = chat(site, {"type": "audio_url", "audio_url": {"url": url}})
    assert status == 200 and answer["choices"][0]["message"]["content"] == text, answer
    with OpenAI(base_url=f"{site.url}/v1", api_key="none") as client:
        asked: Any = [inline(data), {"type": "text", "text": "What is it?"}]
        messages: Any = [{"role": "user", "content": asked}]
        found = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8)
        assert found.choices[0].message.content == text
        items: Any = [{"role": "user", "content": [inline(data), {"type": "input_text", "text": "What is it?"}]}]
        response = client.responses.create(model=MODEL, input=items, temperature=0, max_output_tokens=8)
        assert response.output_text == text
    given = httpx.get(f"{site.url}/v1/responses/{response.id}/input_items").json()["data"][0]["content"][0]
    assert given == inline(data)
    with Client(site.target) as client:
        for part in ({"type": "audio_url", "audio_url": {"url": url}}, {"type": "audio", "audio": wav(3)}):
            asked = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
            assert client.chat(asked, temperature=0, max_tokens=8).text == text
    assert site.server.engine.metrics.sounds_encoded == 2
    assert site.server.engine.metrics.compilations_after_ready == 0


def test_a_stored_conversation_keeps_its_sound(site: ServerThread) -> None:
    own = {"temperature": 0, "max_output_tokens": 8}
    first = [{"role": "user", "content": [inline(stored(5)), {"type": "input_text", "text": "What is it?"}]}]
    begun = post(site, "/v1/responses", own | {"input": first})[1]
    status, answer = post(site, "/v1/responses", own | {"input": "Sure?", "previous_response_id": begun["id"]})
    assert status == 200, answer
    whole = [*first, *begun["output"], {"role": "user", "content": "Sure?"}]
    same = post(site, "/v1/responses", own | {"input": whole})[1]
    assert answer["output"][0]["content"] == same["output"][0]["content"]
    status, answer = post(site, "/v1/responses/compact", {"previous_response_id": begun["id"]})
    assert status == 200 and answer["output"][0]["content"][0] == inline(stored(5)), answer


@pytest.mark.parametrize(
    ("data", "form", "why"),
    [
        ("AAAA", "wav", "not WAV"),
        ("@@@@", "wav", "invalid base64"),
        (stored(1), "pcm16", "format must be one of"),
        (base64.b64encode(wav(0) + b"\0" * 64).decode(), "wav", None),
        (7, "wav", "must be"),
    ],
)
def test_a_wrong_sound_is_named(site: ServerThread, data: Any, form: str, why: str | None) -> None:
    status, answer = chat(site, inline(stored(1)), inline(data, form))
    if why is None:  # bytes after the content
        assert status == 200, answer
        return
    error = answer["error"]
    assert status == 400 and why in error["message"] and error["param"] == "messages", answer
    assert "messages[0].content[1]" in error["message"]
    status, answer = post(site, "/v1/responses", {"input": [{"role": "user", "content": [inline(data, form)]}]})
    error = answer["error"]
    assert status == 400 and why in error["message"] and error["param"] == "input", answer
    assert "input[0].content[0]" in error["message"]
    if isinstance(data, str) and form == "wav":
        part = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}}
        named = re.escape("chat.messages[0].parts[0]")
        with Client(site.target) as client, pytest.raises(UserError, match=named) as caught:
            client.chat([{"role": "user", "content": [part]}], max_tokens=8)
        assert why in str(caught.value) and caught.value.parameter == "messages"


def test_too_many_sounds_and_images_are_refused(site: ServerThread) -> None:
    status, answer = chat(site, *[inline(stored(1))] * 3)
    assert status == 400 and "messages[0].content[2]: a request may have 2 sounds" in answer["error"]["message"]
    status, answer = chat(site, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
    assert status == 400 and "messages[0].content[0] is a part of type 'image_url'" in answer["error"]["message"]
