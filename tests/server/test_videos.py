"""Videos over every API: equal answers in every form, and errors that name the part."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.client import Client
from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm_server.shared.options import ServerOptions
from tests.support.server_thread import ServerThread
from tests.support.sizes import SLOTS
from tests.support.videos import animation, jpegs, recording, url
from tests.support.vision_models import video, write_any_size

pytestmark = pytest.mark.ci
FRAMES = video(3, frames=6)[:, :32, :32]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "a.gif").write_bytes(animation(FRAMES, "GIF"))
    return folder


@pytest.fixture(scope="module")
def site(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    folder = write_any_size(tmp_path_factory.mktemp("qwen"), "qwen3_vl")
    config = EngineConfig(
        model=str(folder), limit_mm_per_prompt={"video": 2}, allowed_local_media_path=str(files), **SLOTS
    )
    site = ServerThread(config, ServerOptions(port=0, grpc_port=0, served_model_name=("qwen",)))
    yield site
    site.close()


def post(site: ServerThread, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    answer = httpx.post(f"{site.url}{path}", json={"model": "qwen"} | body, timeout=60)
    return answer.status_code, answer.json()


def chat(site: ServerThread, *urls: Any, **further: Any) -> tuple[int, Any]:
    parts = [{"type": "video_url", "video_url": {"url": each}} for each in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What happens?"}]}]
    return post(site, "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 8, **further})


def respond(site: ServerThread, *urls: Any, **further: Any) -> tuple[int, Any]:
    parts = [{"type": "input_video", "video_url": each} for each in urls]
    items = [{"role": "user", "content": [*parts, {"type": "input_text", "text": "What happens?"}]}]
    return post(site, "/v1/responses", {"input": items, "temperature": 0, "max_output_tokens": 8, **further})


def grpc_chat(site: ServerThread, *parts: dict[str, Any], **further: Any) -> Any:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What happens?"}]}]
    with Client(site.target) as client:
        return client.chat(messages, temperature=0, max_tokens=8, **further)


def test_a_video_is_read_in_every_form(site: ServerThread, files: Path) -> None:
    """Test that an animation and its file have one answer, and that other files, frames and rates are read."""
    status, answer = chat(site, url(animation(FRAMES, "GIF"), "image/gif"))
    assert status == 200, answer
    encoded = site.server.engine.metrics.images_encoded
    assert encoded == 2  # of 4 frames
    again = chat(site, f"file://{files}/a.gif")[1]
    assert again["choices"] == answer["choices"] and site.server.engine.metrics.images_encoded == encoded
    longer = chat(site, f"file://{files}/a.gif", mm_processor_kwargs={"num_frames": 6})[1]
    assert longer["usage"]["prompt_tokens"] > again["usage"]["prompt_tokens"]
    for given in (
        url(recording(FRAMES, "mp4"), "video/mp4"),
        jpegs(FRAMES),
        url(animation(FRAMES, "PNG"), "image/png"),
    ):
        status, answer = chat(site, given)
        assert status == 200 and answer["usage"]["prompt_tokens"] > 20, answer
    assert site.server.engine.metrics.compilations_after_ready == 0


@pytest.mark.parametrize("options", [{}, {"mm_processor_kwargs": {"num_frames": 6}}])
def test_a_video_gives_the_same_answer_over_every_api(site: ServerThread, files: Path, options: dict[str, Any]) -> None:
    """Test that prompts have equal lengths, answers equal texts, and that no frame is encoded twice."""
    data = animation(FRAMES, "GIF")
    given = url(data, "image/gif")
    due = chat(site, given, **options)[1]
    text, count = due["choices"][0]["message"]["content"], due["usage"]["prompt_tokens"]
    encoded = site.server.engine.metrics.images_encoded
    for each in (given, f"file://{files}/a.gif"):
        status, answer = respond(site, each, **options)
        assert status == 200 and answer["output"][0]["content"][0]["text"] == text, answer
        assert answer["usage"]["input_tokens"] == count
        items = [{"type": "message", "role": "user", "content": [{"type": "input_video", "video_url": each}]}]
        items[0]["content"] += [{"type": "input_text", "text": "What happens?"}]
        status, counted = post(site, "/v1/responses/input_tokens", {"input": items, **options})
        assert status == 200 and counted["input_tokens"] == count, counted
    for part in ({"video_url": {"url": given}}, {"video_url": f"file://{files}/a.gif"}, {"video": data}):
        answer = grpc_chat(site, {"type": next(iter(part)), **part}, **options)
        assert (answer.text, answer.usage.prompt_tokens) == (text, count)
    content = [{"type": "video_url", "video_url": {"url": given}}, {"type": "text", "text": "What happens?"}]
    status, answer = post(site, "/tokenize", {"messages": [{"role": "user", "content": content}], **options})
    assert status == 200 and answer["count"] == count, answer
    with Client(site.target) as client:
        assert len(client.tokenize([{"role": "user", "content": content}], **options)) == count
    assert site.server.engine.metrics.images_encoded == encoded
    assert site.server.engine.metrics.compilations_after_ready == 0


def test_a_stored_conversation_keeps_its_video(site: ServerThread) -> None:
    """As if all items were sent at once, with options of each request; in a compaction, too."""
    given, options = url(animation(FRAMES, "GIF"), "image/gif"), {"mm_processor_kwargs": {"num_frames": 6}}
    begun = respond(site, given)[1]
    first = httpx.get(f"{site.url}/v1/responses/{begun['id']}/input_items").json()["data"]
    assert first[0]["content"][0] == {"type": "input_video", "video_url": given}
    own: dict[str, Any] = {"temperature": 0, "max_output_tokens": 8}
    whole = [*first, *begun["output"], {"role": "user", "content": "Sure?"}]
    counts = []
    for further in ({}, options):
        follow = own | {"input": "Sure?", "previous_response_id": begun["id"]} | further
        status, answer = post(site, "/v1/responses", follow)
        assert status == 200, answer
        same = post(site, "/v1/responses", own | {"input": whole} | further)[1]
        assert answer["output"][0]["content"] == same["output"][0]["content"]
        status, short = post(site, "/v1/responses/compact", {"previous_response_id": begun["id"]} | further)
        assert status == 200 and short["output"][0]["content"][0] == first[0]["content"][0], short
        counts.append((answer["usage"]["input_tokens"], short["usage"]["input_tokens"]))
    assert counts[0][0] < counts[1][0] and counts[0][1] < counts[1][1]
    status, answer = respond(site, given, given, previous_response_id=begun["id"])
    assert status == 400 and answer["error"]["message"].startswith("input[0].content[1]: a request may have 2 videos")
    status, answer = respond(site, given, truncation="auto")
    assert status == 400 and answer["error"]["param"] == "truncation", answer


def test_a_wrong_video_is_named(site: ServerThread) -> None:
    data = animation(FRAMES, "GIF")
    for urls, why in (
        (["http://localhost/a.mp4"], "not an allowed source of videos"),
        (["file:///etc/passwd"], "may be read"),
        (["data:video/mp4;base64,AAAA"], "can be read"),
        ([url(data, "text/html")], "data:video"),
        ([url(data[:40], "image/gif")], "can be read"),
        ([url(data, "image/gif")] * 3, "2 videos"),
        ([5], "must be a text"),
    ):
        status, answer = chat(site, *urls)
        error = answer["error"]
        assert status == 400 and why in error["message"] and error["param"] == "messages", answer
        named = f"[0].content[{len(urls) - 1}]"
        assert f"messages{named}" in error["message"]
        status, answer = respond(site, *urls)
        error = answer["error"]
        assert status == 400 and why in error["message"] and error["param"] == "input", answer
        assert f"input{named}" in error["message"]
        if all(isinstance(each, str) for each in urls):
            named = re.escape(f"chat.messages[0].parts[{len(urls) - 1}]")
            with pytest.raises(UserError, match=named) as caught:
                grpc_chat(site, *({"type": "video_url", "video_url": each} for each in urls))
            assert why in str(caught.value) and caught.value.parameter == "messages"
    for given, urls in (
        ({"fps": 0}, [url(data, "image/gif")]),
        ({"crop": 1}, [url(data, "image/gif")]),
        ({"fps": 1}, []),
    ):
        for ask in (chat, respond):
            status, answer = ask(site, *urls, mm_processor_kwargs=given)
            assert status == 400 and answer["error"]["param"] == "mm_processor_kwargs", answer
        with pytest.raises(UserError, match="mm_processor_kwargs") as caught:
            grpc_chat(site, *({"type": "video_url", "video_url": each} for each in urls), mm_processor_kwargs=given)
        assert caught.value.parameter == "mm_processor_kwargs"
    assert chat(site)[0] == 200


def test_apis_without_videos_refuse_them(site: ServerThread) -> None:
    """Test that one line names the part and the APIs that take videos, also for videos in the place of images."""
    data = base64.b64encode(recording(FRAMES, "mp4")).decode()
    source = {"type": "base64", "media_type": "video/mp4", "data": data}
    block, result = {"type": "video", "source": source}, {"type": "tool_result", "tool_use_id": "toolu_a"}
    part = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}}
    asked: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/messages", {"content": [block]}, "messages[0].content[0]: this API takes no videos"),
        ("/v1/messages", {"content": [part]}, "messages[0].content[0]: this API takes no videos"),
        ("/v1/messages", {"content": [result | {"content": [block]}]}, "messages[0].content[0].content[0]: this API"),
        ("/v1/messages", {"content": [block | {"type": "image"}]}, "messages[0].content[0].image_url is a video"),
        ("/api/chat", {"content": "a", "images": [data]}, "messages[0].images[0].image_url is a video, not an image"),
        ("/api/chat", {"content": "a", "videos": [data]}, "messages[0].videos: this API takes no videos"),
        ("/api/chat", {"content": [part]}, "messages[0].content[0]: this API takes no videos"),
        (
            "/v1/chat/completions",
            {"content": [part | {"type": "image_url", "image_url": part["video_url"]}]},
            "a video,",
        ),
    ]
    bodies = [(path, {"messages": [{"role": "user", **message}]}, why) for path, message, why in asked]
    bodies += [("/api/generate", {"prompt": "a", name: [data]}, name) for name in ("images", "videos")]
    for path, body, why in bodies:
        status, answer = post(site, path, body | {"max_tokens": 8} if path.startswith("/v1") else body)
        error = answer["error"]
        message = error if isinstance(error, str) else error["message"]
        assert status == 400 and why in message and "/v1/chat/completions" in message, answer
    with pytest.raises(UserError, match=re.escape("chat.messages[0].parts[0] is a video, not an image")):
        grpc_chat(site, {"type": "image", "image": base64.b64decode(data)})
