"""Small valid files of every container and codec, which `media_draws.py` changes."""

from __future__ import annotations

import functools
import io
import os
import struct
import wave
from typing import Any

import numpy as np
from PIL import Image

from tests.support.videos import ANIMATIONS, animation

os.environ.setdefault("SVT_LOG", "0")
_RECORDINGS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("mp4", "libx264", "yuv420p", {}),
    ("mp4", "libx264", "yuv420p10le", {}),
    ("mp4", "libx264", "yuv444p", {"flags": "+ilme+ildct"}),
    ("mp4", "libx265", "yuv420p", {"x265-params": "log-level=none:pools=1"}),
    ("mp4", "mpeg4", "yuv420p", {"bf": "2"}),
    ("mp4", "libsvtav1", "yuv420p", {"preset": "12"}),
    ("mov", "mjpeg", "yuvj420p", {}),
    ("mov", "libx264", "yuv420p", {}),
    ("webm", "libvpx", "yuv420p", {}),
    ("webm", "libvpx-vp9", "yuv420p", {}),
    ("webm", "libsvtav1", "yuv420p", {"preset": "12"}),
    ("matroska", "libx264", "yuv420p", {}),
    ("matroska", "mpeg4", "yuv420p", {}),
    ("matroska", "ffv1", "yuv420p", {}),  # refused
    ("avi", "mpeg4", "yuv420p", {}),
    ("avi", "mjpeg", "yuvj420p", {}),
    ("avi", "libx264", "yuv420p", {}),
)


def recording(
    frames: np.ndarray, kind: str, codec: str, pixels: str = "yuv420p", options: Any = None, muxer: Any = None
) -> bytes:
    """Return a file of frames uint8[T, H, W, 3], four a second."""
    import av  # pyright: ignore[reportMissingImports]

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind, options=muxer or {}) as container:
        stream: Any = container.add_stream(codec, rate=4, options=options or {})
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], pixels
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    if codec == "libsvtav1" and hasattr(os, "sched_setscheduler"):
        # As root the encoder gives its caller a real-time priority, which would stop other processes.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return buffer.getvalue()


def with_sound(kind: str, with_picture: bool) -> bytes:
    """Return a file with a stream of sound, alone or after one of pictures."""
    import av  # pyright: ignore[reportMissingImports]

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        picture: Any = container.add_stream("mpeg4", rate=4) if with_picture else None
        sound: Any = container.add_stream("mp3" if kind == "avi" else "aac", rate=44100)
        if picture:
            picture.width, picture.height, picture.pix_fmt = 32, 24, "yuv420p"
            for frame in _frames():
                container.mux(picture.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(picture.encode())
        made = av.AudioFrame.from_ndarray(np.zeros((2, 4608), np.float32), format="fltp", layout="stereo")
        made.sample_rate = 44100
        container.mux(sound.encode(made))
        container.mux(sound.encode())
    return buffer.getvalue()


def _frames(count: int = 5, height: int = 24, width: int = 32) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8)


@functools.cache
def videos() -> tuple[bytes, ...]:
    noise = _frames()
    found = [animation(noise, kind) for kind in ANIMATIONS]
    found += [animation(noise[:1], kind) for kind in ANIMATIONS]
    found += [recording(noise, *each) for each in _RECORDINGS]
    found += [recording(_frames(1), *_RECORDINGS[0]), recording(_frames(3, 2, 2), *_RECORDINGS[0])]
    found.append(recording(noise, *_RECORDINGS[0], {"movflags": "frag_keyframe+empty_moov"}))
    found.append(recording(_frames(9, 200, 264)[:, ::8, ::8].repeat(8, 1).repeat(8, 2), *_RECORDINGS[0]))
    found += [with_sound(kind, has) for kind in ("mp4", "matroska", "avi") for has in (True, False)]
    return tuple(found)


@functools.cache
def frame_files() -> tuple[bytes, ...]:
    """Return files of single frames, one of each format and one of another size."""
    found = []
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        buffer = io.BytesIO()
        Image.fromarray(_frames()[0]).save(buffer, kind)
        found.append(buffer.getvalue())
    for options in ({"progressive": True}, {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"}):
        buffer = io.BytesIO()
        Image.fromarray(_frames()[0]).save(buffer, "JPEG", **options)
        found.append(buffer.getvalue())
    buffer = io.BytesIO()
    Image.fromarray(_frames(1, 31, 40)[0]).save(buffer, "JPEG")
    return (*found, buffer.getvalue())


def _wave(width: int, channels: int, rate: int, count: int = 800) -> bytes:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, count * width * channels, np.uint8).tobytes()
    with wave.open(buffer, "wb") as file:
        file.setsampwidth(width)
        file.setnchannels(channels)
        file.setframerate(rate)
        file.writeframes(noise)
    return buffer.getvalue()


@functools.cache
def sounds() -> tuple[bytes, ...]:
    """Return files of all formats and kinds of samples that are read, and of some that are refused."""
    import soundfile  # pyright: ignore[reportMissingImports]

    found = [_wave(width, channels, rate) for width in (1, 2, 3, 4) for channels, rate in ((1, 16000), (2, 44100))]
    found += [_wave(2, 6, 48000), _wave(1, 1, 100, 40), _wave(2, 1, 384000), _wave(2, 1, 16000, 1)]
    noise = np.random.default_rng(1).normal(0, 0.1, (2400, 2))
    for kind, subtypes, rates in (
        ("WAV", ("FLOAT", "DOUBLE", "ULAW", "ALAW", "IMA_ADPCM", "MS_ADPCM", "GSM610", "NMS_ADPCM_32"), (8000,)),
        ("WAV", ("G721_32", "MPEG_LAYER_III"), (16000,)),
        ("WAVEX", ("PCM_16", "FLOAT"), (16000,)),
        ("RF64", ("PCM_16", "FLOAT"), (16000,)),
        ("FLAC", ("PCM_16", "PCM_24"), (16000, 44100, 96000)),
        ("OGG", ("VORBIS", "OPUS"), (16000, 48000)),
        ("MP3", ("MPEG_LAYER_III",), (16000, 44100)),
        ("AIFF", ("PCM_16", "FLOAT"), (16000,)),
        ("AU", ("PCM_16",), (16000,)),
        ("CAF", ("PCM_16", "ALAC_16"), (16000,)),
        ("W64", ("PCM_16",), (16000,)),
        ("VOC", ("PCM_16",), (16000,)),
        ("MAT5", ("PCM_16",), (16000,)),
        ("NIST", ("PCM_16",), (16000,)),
        ("SVX", ("PCM_16",), (16000,)),
    ):
        for subtype in subtypes:
            for rate in rates:
                for channels in (1, 2):
                    buffer = io.BytesIO()
                    try:
                        soundfile.write(buffer, noise[:, :channels], rate, subtype, format=kind)
                    except (RuntimeError, ValueError):  # the format lacks the kind of samples
                        continue
                    found.append(buffer.getvalue())
    mp3 = next(each for each in reversed(found) if each[:1] == b"\xff" and each[1] >= 0xE0)
    tag = b"ID3\4\0\0\0\0\0\x0bTIT2\0\0\0\1\0\0\0"
    found += [tag + mp3, tag * 3 + mp3, tag + found[0]]
    found.append(_float_wave(np.array([np.nan, np.inf, -np.inf, 1e30, 0.5] * 400, np.float32)))
    return tuple(dict.fromkeys(found))


def _float_wave(values: np.ndarray) -> bytes:
    form = struct.pack("<HHIIHH", 3, 1, 16000, 64000, 4, 32)
    content = b"WAVEfmt " + len(form).to_bytes(4, "little") + form
    content += b"data" + values.nbytes.to_bytes(4, "little") + values.tobytes()
    return b"RIFF" + len(content).to_bytes(4, "little") + content
