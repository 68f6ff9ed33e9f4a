"""Videos over HTTP: equal answers in every form, and errors that name the part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.config import EngineConfig
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
    site = ServerThread(config, ServerOptions(port=0, served_model_name=("qwen",)))
    yield site
    site.close()


def chat(site: ServerThread, *urls: Any, **further: Any) -> tuple[int, Any]:
    parts = [{"type": "video_url", "video_url": {"url": each}} for each in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What happens?"}]}]
    body = {"model": "qwen", "messages": messages, "temperature": 0, "max_tokens": 8, **further}
    answer = httpx.post(f"{site.url}/v1/chat/completions", json=body, timeout=60)
    return answer.status_code, answer.json()


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
        assert f"messages[0].content[{len(urls) - 1}]" in error["message"]
    for given, urls in (
        ({"fps": 0}, [url(data, "image/gif")]),
        ({"crop": 1}, [url(data, "image/gif")]),
        ({"fps": 1}, []),
    ):
        status, answer = chat(site, *urls, mm_processor_kwargs=given)
        assert status == 400 and answer["error"]["param"] == "mm_processor_kwargs", answer
    assert chat(site)[0] == 200
