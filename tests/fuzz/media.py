"""Hostile images and sound: each target reads one as a server does for a part of a message.

Any content is read or refused by a `UserError`, which names an image's part; no connection is made.
"""

from __future__ import annotations

import base64
import functools
import io
import socket
import wave
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from jaxllm.errors import UserError
from jaxllm.media import sound_files
from jaxllm.media.messages import take_images
from jaxllm.media.patches import read_patches
from jaxllm.media.processor import Processor, read_processor
from jaxllm.media.sound import LogMel
from jaxllm.media.sound_files import read_sound
from jaxllm.media.sounds import SoundProcessor
from jaxllm.media.sources import Sources
from tests.fuzz.videos import SoundInProcess
from tests.support.vision_models import SIDE, processor_settings

MOST_MEMORY = 1 << 29  # bytes, of an image with the most pixels
MIMES = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp", "image/svg+xml", "text/html", "", "image/*")
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F", "YCbCr")
URLS = (
    "https://example.com/a.png",
    "http://127.0.0.1:8000/health",
    "http://169.254.169.254/latest/meta-data",
    "file:///etc/passwd",
    "file://../../etc/shadow",
    "//example.com/a.png",
    "gopher://localhost:70/_",
    "http://[::1]/a.png",
    "data:image/png;base64,iVBORw0KGgo=",
)


@functools.cache
def processors() -> tuple[Processor, ...]:
    """Return a processor for one size, and one for images of any size."""
    return read_processor(processor_settings(), 9, 16, SIDE), read_patches(
        {"patch_size": 7, "max_pixels": 1 << 16}, 9, None, 7, 2
    )


def take_image(data: bytes) -> None:
    """Read a URL, or a file in a data: URL: the first byte chooses the type, or says that a URL follows."""
    kind, content = data[:1].ljust(1, b"\0")[0] % (len(MIMES) + 1), data[1:]
    if kind == len(MIMES):
        url = content.decode(errors="replace")
    else:
        url = f"data:{MIMES[kind]};base64,{base64.b64encode(content).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "?"}, part]}]
    unreachable = AssertionError("a connection is made")
    with (
        mock.patch.object(socket.socket, "connect", side_effect=unreachable),
        mock.patch.object(socket, "getaddrinfo", side_effect=unreachable),
    ):
        for processor in processors():
            try:
                _, (image,) = take_images(messages, processor, Sources(), 4)
            except UserError as error:
                assert str(error).startswith("messages[0].content[1]"), error
                raise
            assert np.isfinite(image.pixels).all() and 0 < image.num_tokens <= processor.most_tokens


def take_sound(data: bytes) -> None:
    """Read a file of sound as a part of a message, and up to the spectrogram of an encoder."""
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
    processor = SoundProcessor(placeholder=9, num_mels=80, num_states=50, joined=2, reads_silence=False)
    with mock.patch.object(sound_files, "SoundProcess", SoundInProcess):
        _take_sound(data, part, processor)


def _take_sound(data: bytes, part: dict[str, Any], processor: SoundProcessor) -> None:
    try:
        _, (sound,) = take_images([{"role": "user", "content": [part]}], processor, Sources(), 1)
    except UserError as error:
        assert str(error).startswith("messages[0].content[0]"), error
    else:
        assert np.isfinite(sound.pixels).all() and 0 < sound.num_tokens <= processor.most_tokens
    bands = LogMel(80, 100).spectrogram(read_sound(data, most=1.0))
    assert bands.shape == (80, 100) and np.isfinite(bands).all()


def images() -> list[bytes]:
    """Return files of all formats and modes that Pillow writes, with and without an orientation, and URLs."""
    found = [bytes([len(MIMES)]) + url.encode() for url in URLS]
    pixels = np.random.default_rng(0).integers(0, 256, (13, 21, 3), np.uint8)
    given = Image.fromarray(pixels)
    frames = [given, given.transpose(Image.Transpose.FLIP_TOP_BOTTOM)]
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "ICO", "PPM"):
        mime = next((at for at, name in enumerate(MIMES) if name.endswith(kind.lower())), 0)
        for mode in MODES:
            for options in ({}, {"exif": exif}, {"save_all": True, "append_images": frames}, {"progressive": True}):
                buffer = io.BytesIO()
                try:
                    _in_mode(given, mode).save(buffer, kind, **options)
                except (OSError, ValueError, KeyError, SystemError):  # the format lacks the mode
                    continue
                found.append(bytes([mime]) + buffer.getvalue())
    return [*dict.fromkeys(found)]


def _in_mode(given: Image.Image, mode: str) -> Image.Image:
    if mode == "I;16":
        return Image.fromarray(np.asarray(given.convert("L")).astype(np.uint16) * 257)
    return given.convert(mode)


def sounds() -> list[bytes]:
    """Return WAV files of several widths, channels and rates."""
    found = []
    noise = np.random.default_rng(0).integers(0, 256, 2400, np.uint8).tobytes()
    for width in (1, 2, 3, 4):
        for channels in (1, 2, 6):
            for rate in (100, 16000, 384000):
                buffer = io.BytesIO()
                with wave.open(buffer, "wb") as file:
                    file.setsampwidth(width)
                    file.setnchannels(channels)
                    file.setframerate(rate)
                    file.writeframes(noise[: 20 * width * channels])
                found.append(buffer.getvalue())
    return found
