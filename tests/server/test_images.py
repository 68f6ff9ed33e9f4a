"""Images over HTTP, in OpenAI's, Anthropic's and Ollama's form: equal answers, and errors that name the part."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jaxllm.config import EngineConfig
from jaxllm_server.shared.options import ServerOptions
from tests.support.server_thread import ServerThread
from tests.support.sizes import SLOTS
from tests.support.vision_models import image, write_llava

pytestmark = pytest.mark.ci
MODEL = "llava"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    folder = write_llava(tmp_path_factory.mktemp("llava"))
    config = EngineConfig(model=str(folder), limit_mm_per_prompt={"image": 2}, **SLOTS)
    site = ServerThread(config, ServerOptions(port=0, grpc_port=0, served_model_name=(MODEL,)))
    yield site
    site.close()


def stored(seed: int) -> str:
    buffer = io.BytesIO()
    image(seed).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def post(site: ServerThread, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    answer = httpx.post(f"{site.url}{path}", json={"model": MODEL, "stream": False} | body, timeout=60)
    return answer.status_code, answer.json()


def chat(site: ServerThread, *urls: Any, text: str = "What is it?") -> tuple[int, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return post(site, "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 8})


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
    assert site.server.engine.metrics.images_encoded == 2
    assert site.server.engine.metrics.compilations_after_ready == 0


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
    assert chat(site)[0] == 200
