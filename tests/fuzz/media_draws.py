"""Hostile parts of messages, drawn from a number: changed files, false types, broken base64, URLs and bombs."""

from __future__ import annotations

import base64
import functools
import io
import random
from typing import Any

import numpy as np
from PIL import Image

from tests.fuzz import media_files
from tests.fuzz.chunks import NUMBERS, with_changed_chunks, with_changed_fields

MEDIA = ("video", "sound")
Draw = tuple[dict[str, Any], dict[str, Any], str]
_MIMES = {
    "video": ("video/mp4", "video/jpeg", "image/gif", "image/png", "image/apng", "image/webp", "video/webm", "video/*"),
    "sound": ("audio/wav", "audio/mpeg", "audio/ogg", "audio/flac", "audio/*", "audio/wav;codecs=1"),
}
_WRONG = ("text/html", "", "application/pdf", "image/jpeg", "video", "audio", "VIDEO/MP4", "image/svg+xml", "a/b")
_TEXTS = (
    b"#EXTM3U\nhttp://127.0.0.1/a.ts\n",
    b"ffconcat version 1.0\nfile /etc/passwd\n",
    b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n",
    b"<svg xmlns='http://www.w3.org/2000/svg'><image href='http://127.0.0.1/a'/></svg>",
    b"<?xml version='1.0'?><MPD><BaseURL>http://127.0.0.1/</BaseURL></MPD>",
    b"PK\3\4" + bytes(60),
    b"\x1f\x8b\x08" + bytes(60),
    b"RIFF\xff\xff\xff\xffRIFF\xff\xff\xff\xffAVI ",
    b"ID3\4\0\0\x7f\x7f\x7f\x7f",
    b"fLaC",
    b"OggS",
    b"GIF89a",
    b"\0\0\0\x08ftyp",
    b"",
)
_URLS = (
    "http://127.0.0.1:{}/a",
    "https://example.com/{}.mp4",
    "file:///etc/passwd?{}",
    "file://host/share/{}",
    "//h/{}",
    "ftp://example.com/{}",
    "\\\\host\\share\\{}",
    "unc://host/{}",
    "http://[::1]:{}/",
    "http://[:{}",
    "{}",
    "file:{}",
    "http://169.254.169.254/latest/{}",
    "rtsp://127.0.0.1/{}",
    "pipe:{}",
    "subfile,,start,0,end,9,,:/{}",
    "concat:{}|a",
    "http://example.com@127.0.0.1/{}",
    "data:{}",
    "data:,{}",
    "data:video/mp4;base64{}",
    "data:;base64,{}",
    "crypto:{}",
    "http://\u0660{}",
    "http://a\0b/{}",
    "file:///%2e%2e/{}",
    "file:///etc/\0{}",
    "gopher://a:70/_{}",
    "HTTP://A/{}",
)
_OPTIONS: tuple[Any, ...] = (1, 2, 4, 7, 65536, 65537, 0, -1, 0.5, 1e6, 1e-9, 1e300, float("inf"), float("nan"), None)
_OPTIONS += (True, False, "2", [], {}, 10**30)


def draw(medium: str, number: int) -> Draw:
    """Return a content part, the request's `mm_processor_kwargs`, and the kind of change."""
    chance = random.Random(f"{medium} {number}")
    options: dict[str, Any] = {}
    if medium == "video" and chance.random() < 0.2:
        names = ("fps", "num_frames", "min_frames", "max_frames", "do_sample_frames", "size")
        options = {chance.choice(names): chance.choice(_OPTIONS) for _ in range(chance.randrange(3))}
    value = chance.random()
    if value < 0.06:
        return _part(medium, _with_noise(chance.choice(_URLS), chance), chance), options, "URL"
    if value < 0.08:
        return _shapeless(medium, chance), options, "part"
    if value < 0.12:
        return _part(medium, _broken(medium, chance), chance), options, "base64"
    if medium == "video" and value < 0.2:
        return _part(medium, _list(chance), chance), options, "list of JPEGs"
    data, kind = _file(medium, chance)
    if medium == "sound" and chance.random() < 0.5:
        form = chance.choice(("wav", "mp3", "flac", "ogg", "WAV", "m4a", None)) if chance.random() < 0.1 else "wav"
        return {"type": "input_audio", "input_audio": {"data": _text(data), "format": form}}, options, kind
    return _part(medium, f"data:{_mime(medium, data, chance)};base64,{_text(data)}", chance), options, kind


def _file(medium: str, chance: random.Random) -> tuple[bytes, str]:
    seeds = media_files.videos() if medium == "video" else media_files.sounds()
    value = chance.random()
    if value < 0.01:
        return chance.choice(_TEXTS) + chance.randbytes(chance.choice((0, 1, 300))), "text"
    if value < 0.03:
        return chance.choice(seeds), "unchanged"
    if value < 0.034:
        data = chance.choice(bombs(medium))
        return (_changed(data, data, chance) if chance.random() < 0.3 else data), "bomb"
    if value < 0.05:
        return _claim(medium, chance), "claim"
    data, other = chance.choice(seeds), chance.choice(seeds)
    if value < 0.65:
        return with_changed_chunks(data, other, chance)
    kind = "bytes"
    for _ in range(chance.choice((1, 1, 2, 3))):
        data = _changed(data, other, chance)
    return data, kind


def _changed(data: bytes, other: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    until = min(len(data), at + chance.choice((1, 2, 8, 64, 1024)))
    match chance.randrange(8):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + data[until:]
        case 2:
            return data[:at] + chance.randbytes(until - at) + data[until:]
        case 3:
            return data[:until] + data[at:until] * chance.choice((1, 2, 50, 500)) + data[until:]
        case 4:
            return data[:at] + other[chance.randrange(len(other) + 1) :]
        case 5:
            return with_changed_fields(data, chance)
        case 6:
            held = bytearray(data)
            for _ in range(chance.choice((1, 3, 30))):
                if held:
                    held[chance.randrange(len(held))] ^= 1 << chance.randrange(8)
            return bytes(held)
        case _:
            return data[:at] + bytes(chance.choice((1, 16, 4096))) + data[at:]


def _claim(medium: str, chance: random.Random) -> bytes:
    """Return a file with false numbers in its head."""
    number = chance.choice(NUMBERS)
    if medium == "sound":
        rate, channels, width = (
            chance.choice(NUMBERS),
            chance.choice(NUMBERS) & 0xFFFF,
            chance.choice((0, 1, 8, 16, 64)),
        )
        form = (chance.choice((1, 2, 3, 6, 0x11, 0xFFFE))).to_bytes(2, "little") + channels.to_bytes(2, "little")
        form += (rate & 0xFFFFFFFF).to_bytes(4, "little") + bytes(4) + b"\1\0" + width.to_bytes(2, "little")
        data = b"WAVEfmt \x10\0\0\0" + form + b"data" + (number & 0xFFFFFFFF).to_bytes(4, "little")
        return (
            b"RIFF" + (number & 0xFFFFFFFF).to_bytes(4, "little") + data + chance.randbytes(chance.choice((0, 1, 99)))
        )
    high = (number & 0xFFFF).to_bytes(2, "little") + (chance.choice(NUMBERS) & 0xFFFF).to_bytes(2, "little")
    gif = b"GIF89a" + high + b"\x80\0\0\0\0\0\xff\xff\xff"
    frame = b"\x21\xf9\4\0\1\0\0\0" + b"," + bytes(4) + chance.choice((high, b"\1\0\1\0")) + b"\0\2\2D\1\0"
    return gif + frame * chance.choice((0, 1, 40, 5000)) + chance.choice((b";", b""))


@functools.cache
def bombs(medium: str) -> tuple[bytes, ...]:
    """Return small files of many pixels or samples."""
    if medium == "sound":
        import soundfile  # pyright: ignore[reportMissingImports]

        found = []
        for kind, rate, channels, seconds in (
            *(("FLAC", 384000, 1, 9), ("FLAC", 48000, 8, 9), ("FLAC", 8000, 1, 700), ("FLAC", 1, 1, 20)),
            *(("OGG", 48000, 2, 9), ("MP3", 8000, 1, 99)),
        ):
            buffer = io.BytesIO()
            soundfile.write(buffer, np.zeros((rate * seconds, channels), np.int16), rate, format=kind)
            found.append(buffer.getvalue())
        return tuple(found)
    flat = np.zeros((9, 1200, 1600, 3), np.uint8)
    found = [media_files.recording(flat, "mp4", "libx264"), media_files.recording(flat, "avi", "mjpeg", "yuvj420p")]
    images = [Image.fromarray(each) for each in flat[:6, :, :, 0] + np.arange(6, dtype=np.uint8)[:, None, None]]
    for kind in ("GIF", "PNG", "WEBP"):
        buffer = io.BytesIO()
        images[0].save(buffer, kind, save_all=True, append_images=images[1:])
        found.append(buffer.getvalue())
    return (*found, with_hidden_frames(320, 240, 300))


@functools.cache
def with_hidden_frames(width: int, height: int, count: int) -> bytes:
    """Return an MP4 file of three frames, of which the last has `count` frames in its packet."""
    import av  # pyright: ignore[reportMissingImports]

    source = io.BytesIO(media_files.recording(np.zeros((3, height, width, 3), np.uint8), "mp4", "libx264"))
    made = io.BytesIO()
    with av.open(source) as given, av.open(made, "w", format="mp4") as container:
        stream = container.add_stream_from_template(given.streams.video[0])
        packets: list[Any] = [each for each in given.demux(given.streams.video[0]) if each.size]
        for at, packet in enumerate(packets):
            new = av.Packet(bytes(packet) * (count if at == len(packets) - 1 else 1))
            new.pts, new.dts, new.duration, new.time_base = packet.pts, packet.dts, packet.duration, packet.time_base
            new.stream, new.is_keyframe = stream, packet.is_keyframe
            container.mux(new)
    return made.getvalue()


def _list(chance: random.Random) -> str:
    files = media_files.frame_files()
    usual = chance.choice((files[:1], files))
    frames = [chance.choice(usual) for _ in range(chance.choice((0, 1, 2, 3, 8)))]
    for at in range(len(frames)):
        if chance.random() < 0.2:
            frames[at] = _changed(frames[at], chance.choice(files), chance)
    texts = [base64.b64encode(each).decode() for each in frames]
    if chance.random() < 0.05:
        texts *= chance.choice((9, 70_000 // max(1, len(texts))))
        texts = texts[: 1 + (1 << 21) // max(1, *map(len, texts), 1)]
    return "data:video/jpeg;base64," + chance.choice((",", ",", ",", ",,", ";", " ,")).join(texts)


def _broken(medium: str, chance: random.Random) -> str:
    seeds = media_files.videos() if medium == "video" else media_files.sounds()
    text, mime = _text(chance.choice(seeds)), chance.choice(_MIMES[medium])
    at = chance.randrange(len(text))
    wrong = chance.choice(("=", "*", "\n", "%", "-_", "é", "\0", "\ud800", "====", " " * 5000))
    match chance.randrange(6):
        case 0:
            text = text[:at] + wrong + text[at:]
        case 1:
            text = text[:at]
        case 2:
            text = text.replace("+", "-").replace("/", "_")
        case 3:
            text = text.rstrip("=") + wrong
        case 4 if chance.random() < 0.02:
            text *= (100 << 20) // len(text)
        case _:
            text += text
    head = chance.choice((";base64", ";BASE64", ";base64;charset=utf-8", ";charset=utf-8;base64", "", ";a=b;base64"))
    return f"data:{mime}{head * chance.choice((1, 1, 1, 2, 90))},{text}"


def _shapeless(medium: str, chance: random.Random) -> dict[str, Any]:
    key = chance.choice(("video_url", "video") if medium == "video" else ("input_audio", "audio_url", "audio"))
    values: tuple[Any, ...] = (None, 1, 1.5, True, "", "x", [], {}, [[]], {"url": None}, {"url": 5}, {"url": [["a"]]})
    values += ({"data": "AAAA"}, {"data": None, "format": 3}, {"data": "", "format": "wav"}, {"url": {}}, [1.0, 2.0])
    return {"type": key, chance.choice((key, "video_url", "audio_url", "image_url")): chance.choice(values)}


def _part(medium: str, url: str, chance: random.Random) -> dict[str, Any]:
    key = "video_url" if medium == "video" else "audio_url"
    return {"type": key, key: url if chance.random() < 0.1 else {"url": url}}


def _mime(medium: str, data: bytes, chance: random.Random) -> str:
    if chance.random() < 0.04:
        return chance.choice((*_WRONG, *_MIMES["sound"], *_MIMES["video"]))
    return chance.choice(tuple(each for each in _MIMES[medium] if each != "video/jpeg"))


def _with_noise(url: str, chance: random.Random) -> str:
    return url.replace(
        "{}", chance.choice(("", "9", "a/../b", "%00", "é", "x" * 3000, "a,b", ";base64,AAAA", "\n", " "))
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
