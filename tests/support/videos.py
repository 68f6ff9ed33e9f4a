"""Files of videos, in the formats that the server reads."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

ANIMATIONS = ("GIF", "WEBP", "PNG")
CONTAINERS = {"mp4": "mpeg4", "matroska": "mpeg4", "avi": "mjpeg", "webm": "libvpx-vp9"}


def animation(frames: np.ndarray, kind: str, milliseconds: int = 250) -> bytes:
    """Return an animated image of frames uint8[T, H, W, 3]."""
    first, *others = [Image.fromarray(frame) for frame in frames]
    buffer = io.BytesIO()
    options: dict[str, Any] = {"save_all": True, "append_images": others, "duration": milliseconds}
    first.save(buffer, kind, **options | ({"lossless": True} if kind == "WEBP" else {}))
    return buffer.getvalue()


def recording(frames: np.ndarray, kind: str, fps: int = 4) -> bytes:
    """Return a file of a container in `CONTAINERS`."""
    import av  # pyright: ignore[reportMissingImports]

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream: Any = container.add_stream(CONTAINERS[kind], rate=fps)
        stream.width, stream.height = frames.shape[2], frames.shape[1]
        stream.pix_fmt = "yuvj420p" if CONTAINERS[kind] == "mjpeg" else "yuv420p"
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()


def jpegs(frames: np.ndarray) -> str:
    """Return the data: URL of vLLM's clients."""
    found = []
    for frame in frames:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "JPEG", quality=100)
        found.append(base64.b64encode(buffer.getvalue()).decode())
    return "data:video/jpeg;base64," + ",".join(found)


def url(data: bytes, mime: str) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"
