"""Hostile videos: each is read as a server does for a part of a message; see media.py."""

from __future__ import annotations

import base64
import functools
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import numpy as np

from jaxllm.errors import UserError
from jaxllm.media import films
from jaxllm.media.decoder_worker import Recording, Sound
from jaxllm.media.patches import PatchProcessor, read_patches
from jaxllm.media.sources import Sources
from jaxllm.media.video_messages import take_videos
from jaxllm.media.videos import read_videos
from tests.support.videos import ANIMATIONS, CONTAINERS, animation, jpegs, recording

MIMES = ("video/mp4", "video/jpeg", "image/gif", "image/webp", "video/*", "text/html", "")


class InProcess(Recording):
    """Decodes in this process, because each start of another takes 0.2 s."""

    def __init__(self, data: bytes, container: str, most_frames: int, name: str, parameter: str) -> None:
        with _refused(name):
            super().__init__(data, container, most_frames, name, parameter)

    def frames(self, indices: Sequence[int]) -> Iterator[bytes]:
        with _refused(self._name):
            yield from super().frames(indices)

    def end(self) -> None:
        pass


class SoundInProcess(Sound):
    """Decodes in this process."""

    def __init__(self, data: bytes, name: str, parameter: str, more_seconds: int) -> None:
        with _refused(name):
            super().__init__(data, name, parameter)

    def blocks(self) -> Iterator[bytes]:
        with _refused(self._name):
            yield from super().blocks()

    def end(self) -> None:
        self._file.close()


@contextmanager
def _refused(name: str) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise UserError(f"{name} takes too much memory.") from None


@functools.cache
def processors() -> tuple[PatchProcessor, ...]:
    """Return a processor with bounds of pixels for each frame, and one with bounds for all."""
    images = read_patches({"patch_size": 7}, 9, 8, 7, 2).within(512)
    bounds = {"patch_size": 7, "size": {"shortest_edge": 392, "longest_edge": 1 << 14}}
    found = []
    for is_stamped in (False, True):
        own = read_videos(bounds, placeholder=8, around=(6, 7), is_stamped=is_stamped, rate=2.0, patch=7, merge=2)
        found.append(PatchProcessor(**{**vars(images), "videos": own}).within(512))
    return tuple(found)


def take_video(data: bytes) -> None:
    """Read a file in a data: URL, whose type the first byte chooses; that of JPEGs has commas."""
    kind, content = MIMES[data[:1].ljust(1, b"\0")[0] % len(MIMES)], data[1:]
    url = f"data:{kind};base64," + ",".join(base64.b64encode(each).decode() for each in content.split(b"\0,\0"))
    messages = [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "video_url", "video_url": url}]}]
    unreachable = AssertionError("a connection is made")
    with (
        mock.patch.object(socket.socket, "connect", side_effect=unreachable),
        mock.patch.object(socket, "getaddrinfo", side_effect=unreachable),
        mock.patch.object(films, "RecordingProcess", InProcess),
    ):
        for processor in processors():
            try:
                _, (video,) = take_videos(messages, processor, Sources(), 1, {"num_frames": 4})
            except UserError as error:
                assert str(error).startswith("messages[0].content[1]"), error
                raise
            for pair in video.pairs:
                assert np.isfinite(pair.pixels).all() and 0 < pair.num_tokens <= processor.most_tokens


def videos() -> list[bytes]:
    """Return files of all formats."""
    noise = np.random.default_rng(0).integers(0, 256, (5, 24, 32, 3), np.uint8)
    found = [bytes([2]) + animation(noise, kind) for kind in ANIMATIONS]
    found += [bytes([0]) + recording(noise, kind) for kind in CONTAINERS]
    frames = (base64.b64decode(each) for each in jpegs(noise).partition(",")[2].split(","))
    return [*found, bytes([1]) + b"\0,\0".join(frames), bytes([0]) + b"#EXTM3U\nhttp://127.0.0.1/a.ts"]
