"""Read files of sound: WAV, and with soundfile FLAC, OGG and MP3."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jaxllm.errors import UserError
from jaxllm.media.decoder_worker import FRAMES, UNKNOWN
from jaxllm.media.decoders import DamagedError, SoundProcess
from jaxllm.media.sound import MOST_RATE, RATE, UNREADABLE, ratio_of, wav_blocks

MOST_BYTES = 25 << 20  # of a file in a message
MOST_SAMPLES = 1 << 29  # of all channels: some 20 s of a processor
_SAMPLES_A_SECOND = 100_000  # if longer sounds are accepted
_SECONDS_A_SECOND = 60  # of sound, per further second of a processor
_LONGEST = 86400  # seconds, if any length is accepted
_BEGINNINGS = (b"RIFF", b"RF64", b"fLaC", b"OggS")  # or that of an MPEG frame; other readers of the library never run
_WITHOUT_LIBRARY = (
    "The file is no WAV file of integers. FLAC, OGG and MP3 are read where soundfile is installed: "
    "pip install 'jaxllm[media]'."
)


def seconds_of(data: bytes, most: float | None = None) -> float:
    """Return a file's length by its header, without decoding it; raise UserError if it is above `most` seconds."""
    found = _wav_length(data)
    if found is None:
        file = _opened(data, most)
        found = file.facts["frames"] / file.facts["samplerate"]
        file.end()
    return _checked(found, most)


def read_sound(data: bytes, most: float | None = None) -> np.ndarray:
    """Return a file's samples at 16 kHz, float32 from -1 to 1 with channels averaged; raise UserError.

    `most` is a bound in seconds, by the header and while decoding, because a header may be wrong.
    """
    length = _wav_length(data)
    if length is not None:
        _checked(length, most)
        blocks, rate = wav_blocks(data)
    else:
        file = _opened(data, most)
        blocks, rate = _blocks(file, most), file.facts["samplerate"]
    pieces = list(_bounded(resampled(blocks, rate), most))
    if not sum(map(len, pieces)):
        raise UserError("The file has no sound.", "file")
    return np.concatenate(pieces)


def resampled(blocks: Iterable[np.ndarray], rate: int) -> Iterator[np.ndarray]:
    """Yield samples at 16 kHz, the same as `at_rate` of all blocks together."""
    up, down = ratio_of(rate)
    if up == down:
        yield from blocks
        return
    from scipy.signal import firwin, resample_poly

    half = 10 * max(up, down)  # of the filter that `resample_poly` designs
    window: Any = ("kaiser", 5.0)
    taps = np.asarray(firwin(2 * half + 1, 1.0 / max(up, down), window=window), np.float32)
    # Multiples of `down`, so that each piece begins at a sample of the output; neither side of a piece is long.
    most = FRAMES * min(up, down) // up
    piece, context = (-(-count // down) * down for count in (most, half // up + 1))
    held, before = np.zeros(0, np.float32), 0  # not yet written samples, with context before them
    for block in blocks:
        held = np.concatenate([held, block])
        while len(held) >= before + piece + context:
            made = np.asarray(resample_poly(held[: before + piece + context], up, down, window=taps), np.float32)
            yield made[before * up // down : (before + piece) * up // down]
            start = max(0, before + piece - context)
            held, before = held[start:], before + piece - start
    if len(held) > before:
        yield np.asarray(resample_poly(held, up, down, window=taps), np.float32)[before * up // down :]


def _bounded(pieces: Iterable[np.ndarray], most: float | None) -> Iterator[np.ndarray]:
    total = 0
    for piece in pieces:
        total += len(piece)
        _checked((total - 1) / RATE, most)
        yield piece


def _checked(seconds: float, most: float | None) -> float:
    if most is not None and seconds > most:
        raise UserError(f"The sound has more than {most:g} s, the most that is accepted; cut it into pieces.", "file")
    return seconds


def _wav_length(data: bytes) -> float | None:
    """Return a WAV file's length; None if it is another file or has other numbers than integers."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return None
    try:
        with wave.open(io.BytesIO(data)) as file:
            size, rate = file.getsampwidth() * file.getnchannels(), file.getframerate()
            return min(file.getnframes(), len(data) // size) / rate
    except (*UNREADABLE, ZeroDivisionError):
        return None


def _opened(data: bytes, most: float | None) -> SoundProcess:
    """Return the decoder of a file that `wave` does not read; raise UserError if its header claims too much."""
    try:
        import soundfile  # noqa: F401  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError) as error:  # OSError: the wheel has no library for this machine
        raise UserError(_WITHOUT_LIBRARY, "file") from error
    data = _untagged(data)
    if not (data.startswith(_BEGINNINGS) or (data[:1] == b"\xff" and data[1:2] >= b"\xe0")):
        raise UserError(UNKNOWN.format("The file", "unknown format"), "file")
    try:
        file = SoundProcess(data, "The file", "file", int((_LONGEST if most is None else most) / _SECONDS_A_SECOND))
    except DamagedError as error:
        raise UserError(UNKNOWN.format("The file", "it ends early"), "file") from error
    rate = file.facts["samplerate"]
    if not 1 <= rate <= MOST_RATE:
        raise UserError(f"A file's rate must be from 1 to {MOST_RATE} per second, got {rate}.", "file")
    _checked(file.facts["frames"] / rate, most)
    _check_samples(file.facts["frames"] * file.facts["channels"], most)
    return file


def _untagged(data: bytes) -> bytes:
    """Return a file without ID3 tags at its beginning, which the library skips before it chooses a reader."""
    at = 0
    while data[at : at + 3] == b"ID3" and len(data) >= at + 10:
        high, *low = (each & 127 for each in data[at + 6 : at + 10])
        at += 10 + (high << 21 | low[0] << 14 | low[1] << 7 | low[2])
    return data[at:] if at else data


def _check_samples(count: int, most: float | None) -> None:
    if count > max(MOST_SAMPLES, _SAMPLES_A_SECOND * (most or 0)):
        raise UserError(
            f"The sound has more than {MOST_SAMPLES} samples of all channels; send one with fewer channels, or at a "
            "lower rate.",
            "file",
        )


def _blocks(file: SoundProcess, most: float | None) -> Iterator[np.ndarray]:
    total = 0
    try:
        for raw in file.blocks():
            block = np.frombuffer(raw, np.float32)
            total += len(block) * file.facts["channels"]
            _check_samples(total, most)
            yield block
    except DamagedError as error:
        raise UserError(UNKNOWN.format("The file", "it ends early"), "file") from error
    finally:
        file.end()
