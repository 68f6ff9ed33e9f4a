"""Hostile images are refused with an error that names them, before they cost memory; usual ones are decoded."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from jaxllm.errors import UserError
from jaxllm.media.images import MOST_BYTES, decode
from jaxllm.media.messages import ImagePart, take_images
from jaxllm.media.placeholders import expanded
from jaxllm.media.processor import read_processor
from jaxllm.media.sources import Sources
from tests.support.vision_models import SIDE, image, processor_settings

PROCESSOR = read_processor(processor_settings(), 9, 16, SIDE)


def stored(given: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    given.save(buffer, kind, **options)
    return buffer.getvalue()


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes that claims to be large."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


FRAMES = [Image.new("RGB", (9, 9), color) for color in ("red", "blue")]
PICTURE = image(1)
HOSTILE: dict[str, tuple[str, str]] = {
    "a bomb": (url_of(bomb(60_000, 60_000)), "pixels"),
    "a long bomb": (url_of(bomb(30_000_000, 1)), "pixels"),
    "a larger bomb": (url_of(bomb(2**31 - 1, 2**31 - 1)), "image"),
    "no pixels": (url_of(bomb(0, 7)), "image"),
    "a strip": (url_of(bomb(9000, 2)), "times the other"),
    "cut off": (url_of(stored(image(3), "JPEG")[:-200]), "cut off"),
    "a cut PNG": (url_of(stored(PICTURE)[:60]), "cut off"),
    "animated": (url_of(stored(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:])), "animated"),
    "an animated WebP": (url_of(stored(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:])), "animated"),
    "16 bits": (url_of(stored(Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8)))), "8 bits"),
    "another kind": (url_of(stored(PICTURE), "text/html"), "data:image"),
    "no kind": (url_of(stored(PICTURE), ""), "data:image"),
    "a drawing": (url_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "not an image"),
    "a TIFF": (url_of(stored(PICTURE, "TIFF")), "not an image"),
    "nothing": ("data:image/png;base64,", "not an image"),
    "bad base64": ("data:image/png;base64,@@@", "base64"),
    "short base64": ("data:image/png;base64,AAA", "base64"),
    "not in base64": ("data:image/png,abc", "base64"),
    "large": (url_of(b"\0" * (MOST_BYTES + 99)), "too large"),
    "the web": ("https://example.com/a.png", "not an allowed source"),
    "the metadata service": ("http://169.254.169.254/latest/meta-data", "not an allowed source"),
    "a file": ("file:///etc/passwd", "may be read"),
    "a path": ("/etc/passwd", "not an allowed source"),
    "another scheme": ("ftp://example.com/a.png", "not an allowed source"),
    "a broken URL": ("http://[::1", "not a URL"),
    "no text": (7, "must be a text"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_image_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object, **__: object) -> None:
        raise AssertionError("a connection is made")

    monkeypatch.setattr("socket.socket.connect", connect)
    monkeypatch.setattr("socket.getaddrinfo", connect)
    url, why = HOSTILE[name]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": url}}]}
    ]
    with pytest.raises(UserError, match=why) as error:
        take_images(messages, PROCESSOR, Sources(), 4)
    assert "messages[0].content[1]" in str(error.value) and error.value.parameter == "messages"


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400), st.sampled_from(("PNG", "JPEG", "GIF", "WEBP", "BMP")))
def test_any_bytes_give_an_image_or_an_error(noise: bytes, at: int, kind: str) -> None:
    """Test files with a part that is overwritten."""
    data = bytearray(stored(PICTURE, kind))
    data[at : at + len(noise)] = noise
    try:
        assert PROCESSOR.prepare([decode(bytes(data), "it")])
    except UserError as error:
        assert "it" in str(error)


def turned(orientation: int) -> Callable[[Image.Image], bytes]:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return lambda given: stored(given, "JPEG", exif=exif, quality=100, subsampling=0)


def test_usual_images_are_decoded() -> None:
    """Test an orientation in EXIF, CMYK, a palette, transparency, a wrong but harmless subtype, and one frame."""
    given = Image.fromarray(np.repeat(np.repeat(np.array([[[250, 0, 0], [0, 0, 250]]], np.uint8), 8, 0), 8, 1))
    right = np.asarray(Sources().read(url_of(turned(6)(given), "image/jpeg"), "it").convert("RGB"))
    assert right.shape == (16, 8, 3) and right[0, 0, 0] > 200 and right[15, 0, 2] > 200
    for data in (
        stored(PICTURE.convert("CMYK"), "JPEG"),
        stored(PICTURE.convert("P"), "GIF"),
        stored(PICTURE.convert("RGBA"), "WEBP"),
        stored(PICTURE.convert("LA")),
        stored(PICTURE.convert("1"), "BMP"),
    ):
        (prepared,) = PROCESSOR.prepare([Sources().read(url_of(data, "IMAGE/any"), "it")])
        assert prepared.pixels.shape == (3, SIDE, SIDE) and np.isfinite(prepared.pixels).all()


def test_files_are_read_from_the_allowed_folder_alone(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside.png"
    allowed.mkdir()
    outside.write_bytes(stored(PICTURE))
    (allowed / "a.png").write_bytes(stored(PICTURE))
    (allowed / "link.png").symlink_to(outside)
    sources = Sources(folder=str(allowed))
    assert sources.read(f"file://{allowed}/a.png", "it").size == PICTURE.size
    for path in (
        outside,
        allowed / "link.png",
        allowed / ".." / "outside.png",
        allowed,
        allowed / "b.png",
        "/dev/zero",
    ):
        with pytest.raises(UserError, match="may be read"):
            sources.read(f"file://{path}", "it")


def test_urls_are_fetched_from_allowed_domains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a redirect to the same host is followed, one to another host is not, and a slow answer is given up."""
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            places = {"/here": f"http://127.0.0.1:{port}/a.png", "/there": f"http://localhost:{port}/a.png"}
            place = places.get(self.path)
            self.send_response(302 if place else 200 if self.path in ("/a.png", "/slow") else 404)
            if place:
                self.send_header("Location", place)
            self.end_headers()
            with suppress(OSError):
                for byte in stored(PICTURE) * (self.path == "/slow"):
                    self.wfile.write(bytes([byte]))
                    is_over.wait(0.05)
            self.wfile.write(stored(PICTURE))

        def log_message(self, *_: Any) -> None: ...

    is_over = threading.Event()
    server = HTTPServer(("127.0.0.1", 0), Handler)
    port = server.server_port
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        sources = Sources(["127.0.0.1"])
        for path in ("a.png", "here"):
            assert sources.read(f"http://127.0.0.1:{port}/{path}", "it").size == PICTURE.size
        for path in ("there", "none"):
            with pytest.raises(UserError, match="it could not be fetched"):
                sources.read(f"http://127.0.0.1:{port}/{path}", "it")
        with pytest.raises(UserError, match="not an allowed source"):
            sources.read(f"http://localhost:{port}/a.png", "it")
        monkeypatch.setattr("jaxllm.media.sources.FETCH_SECONDS", 0.3)
        with pytest.raises(UserError, match=r"it could not be fetched: it takes more than 0\.3 s"):
            sources.read(f"http://127.0.0.1:{port}/slow", "it")
    finally:
        is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_images_become_parts_of_a_template() -> None:
    url = url_of(stored(PICTURE))
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}, {"type": "image", "image": image(2)}]
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [parts[0], {"type": "text", "text": "b"}, parts[1]]},
    ]
    found, images = take_images(messages, PROCESSOR, Sources(), 2)
    assert found[0] is messages[0] and [part["type"] for part in found[1]["content"]] == ["image", "text", "image"]
    assert isinstance(found[1]["content"][0], ImagePart) and len({each.digest for each in images}) == 2
    with pytest.raises(UserError, match=r"messages\[1\].content\[2\].*1 images"):
        take_images(messages, PROCESSOR, Sources(), 1)
    assert take_images(messages, None, Sources(), 1) == (messages, [])


def test_digests_depend_on_pixels_and_settings() -> None:
    """Test images of equal bytes and different shapes, and another processor."""
    values = np.arange(3 * 6 * 10, dtype=np.uint8).reshape(6, 10, 3)
    other = read_processor(processor_settings() | {"image_mean": [0.4, 0.5, 0.6]}, 9, 16, SIDE)
    digests = {
        PROCESSOR.prepare([values])[0].digest,
        PROCESSOR.prepare([values.reshape(10, 6, 3)])[0].digest,
        PROCESSOR.prepare([values + 1])[0].digest,
        other.prepare([values])[0].digest,
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("ids", "lengths", "due"),
    [
        ([1, 9, 2], [3], ([1, 9, 9, 9, 2], [1])),
        ([9, 9], [2, 1], ([9, 9, 9], [0, 2])),
        ([9, 9, 9, 2], [2, 1], ([9, 9, 9, 2], [0, 2])),
        ([9, 9, 2, 9], [2, 1], ([9, 9, 2, 9], [0, 3])),
        ([9, 2, 9, 9], [2, 1], None),
        ([9], [1, 1], None),
        ([1], [1], None),
        ([9, 9], [3], None),
    ],
)
def test_placeholders_are_repeated(ids: list[int], lengths: list[int], due: tuple[list[int], list[int]] | None) -> None:
    if due is not None:
        assert expanded(ids, 9, lengths) == due
        return
    with pytest.raises(UserError, match="placeholders"):
        expanded(ids, 9, lengths)


@pytest.mark.parametrize(
    "changes",
    [
        {"image_processor_type": "Other"},
        {"size": {"longest_edge": 3}},
        {"size": 0},
        {"crop_size": {"height": 9, "width": 9}},
        {"image_mean": [1]},
        {"resample": 9},
        {"do_resize": 1},
        {"rescale_factor": "a"},
        {"window": 3},
    ],
    ids=str,
)
def test_an_unknown_setting_of_a_processor_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"preprocessor_config\.json"):
        read_processor(processor_settings() | changes, 9, 16, SIDE)
