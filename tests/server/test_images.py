"""Images over HTTP, in OpenAI's, Anthropic's and Ollama's form: equal answers, and errors that name the part."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jaxllm.client import Client
from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm_server.shared.options import ServerOptions
from tests.support.adapters import STEMS, write_adapter
from tests.support.server_thread import ServerThread
from tests.support.sizes import SLOTS
from tests.support.vision_models import TEMPLATE, image, write_llava

pytestmark = pytest.mark.ci
MODEL = "llava"
ADAPTERS = ("plain", "templated")  # the second has a chat template, which runs in another process


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    folder, adapters = write_llava(tmp_path_factory.mktemp("llava")), tmp_path_factory.mktemp("adapters")
    written = [write_adapter(adapters / name, folder, stem=STEMS[0]) for name in ADAPTERS]
    (written[1] / "tokenizer_config.json").write_text(json.dumps({"chat_template": f"Look. {TEMPLATE}"}))
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 2}
    config = EngineConfig(model=str(folder), limit_mm_per_prompt={"image": 2}, **lora, **SLOTS)
    named = tuple(f"{name}={adapters / name}" for name in ADAPTERS)
    options = ServerOptions(port=0, grpc_port=0, served_model_name=(MODEL,), lora_modules=named)
    site = ServerThread(config, options)
    yield site
    site.close()


def stored(seed: int) -> str:
    buffer = io.BytesIO()
    image(seed).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def post(site: ServerThread, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    answer = httpx.post(f"{site.url}{path}", json={"model": MODEL, "stream": False} | body, timeout=60)
    return answer.status_code, answer.json()


def message(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def input_text(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def grpc_chat(site: ServerThread, parts: list[dict[str, Any]]) -> str:
    with Client(site.target) as client:
        return client.chat(message(*parts), temperature=0, max_tokens=8).text


def chat(site: ServerThread, *urls: Any, text: str = "What is it?", model: str = MODEL) -> tuple[int, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, "model": model}
    return post(site, "/v1/chat/completions", body)


def test_an_image_gives_the_same_answer_in_every_form(site: ServerThread) -> None:
    data = stored(3)
    status, answer = chat(site, f"data:image/png;base64,{data}")
    assert status == 200, answer
    text = answer["choices"][0]["message"]["content"]
    assert answer["usage"]["prompt_tokens"] > 16
    assert chat(site, f"data:image/png;base64,{stored(4)}")[1]["choices"][0]["message"]["content"] != text
    source = {"type": "base64", "media_type": "image/png", "data": data}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 8}
    status, answer = post(site, "/v1/messages", body)
    assert status == 200 and answer["content"][0]["text"] == text, answer
    options = {"temperature": 0, "num_predict": 8}
    body = {"messages": [{"role": "user", "content": "What is it?", "images": [data]}], "options": options}
    status, answer = post(site, "/api/chat", body)
    assert status == 200 and answer["message"]["content"] == text, answer
    status, answer = post(site, "/api/generate", {"prompt": "What is it?", "images": [data], "options": options})
    assert status == 200 and answer["response"] == text, answer
    parts = [{"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "low"}]
    own = {"temperature": 0, "max_output_tokens": 8}
    status, answer = post(site, "/v1/responses", own | {"input": message(*parts, input_text("What is it?"))})
    assert status == 200 and answer["output"][0]["content"][0]["text"] == text, answer
    given = httpx.get(f"{site.url}/v1/responses/{answer['id']}/input_items").json()["data"][0]["content"][0]
    assert given == parts[0] | {"file_id": None}
    for given in ({"image_url": {"url": parts[0]["image_url"]}}, {"image": base64.b64decode(data)}):
        asked = [{"type": next(iter(given)), **given}, {"type": "text", "text": "What is it?"}]
        assert grpc_chat(site, asked) == text
    assert site.server.engine.metrics.images_encoded == 2
    assert site.server.engine.metrics.compilations_after_ready == 0


def test_adapters_answer_about_an_image_that_is_encoded_once(site: ServerThread) -> None:
    url, before = f"data:image/png;base64,{stored(7)}", site.server.engine.metrics.images_encoded
    answers = [chat(site, url, model=name) for name in (MODEL, *ADAPTERS, ADAPTERS[0])]
    assert [status for status, _ in answers] == [200] * 4, answers
    texts = [answer["choices"][0]["message"]["content"] for _, answer in answers]
    assert texts[1] == texts[3] and len({*texts}) == 3
    base, plain, templated, _ = (answer["usage"]["prompt_tokens"] for _, answer in answers)
    assert templated > plain == base > 16
    assert site.server.engine.metrics.images_encoded == before + 1


def test_a_tools_result_has_an_image(site: ServerThread) -> None:
    """In Anthropic's form as in OpenAI's, in its place between the texts."""
    data = stored(6)
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    parts = [
        {"type": "text", "text": "Here:"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": "Seen."},
    ]
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": parts},
    ]
    own = {"temperature": 0, "max_tokens": 8}
    status, due = post(site, "/v1/chat/completions", own | {"messages": messages})
    assert status == 200, due
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    result = {"type": "tool_result", "tool_use_id": "toolu_call_1", "content": [parts[0], image, parts[2]]}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_call_1", "name": "look", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    status, answer = post(site, "/v1/messages", own | {"messages": messages})
    assert status == 200, answer
    assert answer["usage"]["input_tokens"] == due["usage"]["prompt_tokens"] > 16
    assert answer["content"][0]["text"] == due["choices"][0]["message"]["content"]
    result["content"][1] = image | {"source": image["source"] | {"data": "AAAA"}}
    status, answer = post(site, "/v1/messages", own | {"messages": messages})
    assert status == 400 and "messages[2].content[0].content[1]" in answer["error"]["message"], answer
    result |= {"is_error": True, "content": [image]}
    status, answer = post(site, "/v1/messages", own | {"messages": messages})
    assert status == 200 and answer["usage"]["input_tokens"] > 16, answer


def test_a_stored_conversation_keeps_its_image(site: ServerThread) -> None:
    """As if all items were sent at once; in a compaction, too."""
    own = {"temperature": 0, "max_output_tokens": 8}
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{stored(5)}"}
    first = message(image, input_text("What is it?"))
    begun = post(site, "/v1/responses", own | {"input": first})[1]
    status, answer = post(site, "/v1/responses", own | {"input": "Sure?", "previous_response_id": begun["id"]})
    assert status == 200, answer
    whole = [*first, *begun["output"], {"role": "user", "content": "Sure?"}]
    assert (
        answer["output"][0]["content"] == post(site, "/v1/responses", own | {"input": whole})[1]["output"][0]["content"]
    )
    counted = post(site, "/v1/responses/input_tokens", {"input": whole})[1]["input_tokens"]
    assert counted == answer["usage"]["input_tokens"] > 16
    status, answer = post(site, "/v1/responses/compact", {"previous_response_id": begun["id"]})
    assert status == 200 and answer["output"][0]["content"][0]["type"] == "input_image", answer
    status, answer = post(site, "/v1/responses", own | {"input": [*answer["output"], *message(input_text("So?"))]})
    assert status == 200, answer
    follow = {"input": message(image, image), "previous_response_id": begun["id"]}
    status, answer = post(site, "/v1/responses", follow)
    assert status == 400 and answer["error"]["message"].startswith("input[0].content[1]: a request may have 2 images")
    assert answer["error"]["param"] == "input"


@pytest.mark.parametrize(
    ("urls", "why"),
    [
        (["http://localhost/a.png"], "not an allowed source"),
        (["file:///etc/passwd"], "may be read"),
        (["data:image/png;base64,AAAA"], "not an image"),
        ([f"data:text/html;base64,{stored(1)}"], "data:image"),
        ([f"data:image/png;base64,{stored(1)}"] * 3, "2 images"),
        ([5], "must be a text"),
    ],
)
def test_a_wrong_image_is_named(site: ServerThread, urls: list[Any], why: str) -> None:
    status, answer = chat(site, *urls)
    error = answer["error"]
    assert status == 400 and why in error["message"] and error["param"] == "messages", answer
    assert f"messages[0].content[{len(urls) - 1}]" in error["message"]
    parts = [{"type": "input_image", "image_url": url} for url in urls]
    status, answer = post(site, "/v1/responses", {"input": message(*parts)})
    error = answer["error"]
    assert status == 400 and why in error["message"] and error["param"] == "input", answer
    assert f"input[0].content[{len(urls) - 1}]" in error["message"]
    if all(isinstance(url, str) for url in urls):
        with pytest.raises(UserError, match=re.escape(f"chat.messages[0].parts[{len(urls) - 1}]")) as caught:
            grpc_chat(site, [{"type": "image_url", "image_url": url} for url in urls])
        assert why in str(caught.value) and caught.value.parameter == "messages"
    assert chat(site)[0] == 200
