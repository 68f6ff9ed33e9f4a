"""Sound for encoders: samples, log-mel spectrograms as Whisper's (Radford et al. 2022), WAV files.

M mel bands, F frames of 10 ms.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from jaxllm.errors import UserError

RATE = 16000  # samples per second
HOP, WINDOW = 160, 400  # samples
MOST_RATE = 384000
MOST_DENOMINATOR = 1000
PARAMETER = "multi_modal_data"
UNREADABLE = wave.Error, EOFError, ValueError, RuntimeError, OverflowError  # by `wave`
_SAMPLES_AT_ONCE = 1 << 18  # of a WAV file
_FRAMES_AT_ONCE = 4096  # of a transform, which needs 3,200 bytes for each


@dataclass(frozen=True)
class LogMel:
    """Makes the spectrogram that an encoder reads."""

    num_mels: int  # M
    num_frames: int  # F; shorter sound is padded with silence, longer sound refused

    @property
    def num_samples(self) -> int:
        return self.num_frames * HOP

    def spectrogram(self, given: Any) -> np.ndarray:
        """Return float32[M, F] of samples: an array at 16 kHz, or a pair of array and rate; raise UserError.

        A `Spectrogram` is returned as it is.
        """
        if isinstance(given, Spectrogram):
            if given.bands.shape != (self.num_mels, self.num_frames) or given.bands.dtype != np.float32:
                raise UserError(f"A spectrogram must be float32[{self.num_mels}, {self.num_frames}].", PARAMETER)
            return given.bands
        samples, rate = samples_of(given)
        longest = self.num_samples
        if len(samples) * RATE > longest * rate:
            raise UserError(
                f"The sound has {len(samples) / rate:.1f} s, and the encoder reads at most {longest / RATE:.0f}; cut "
                "it into pieces.",
                PARAMETER,
            )
        return self.recording(at_rate(samples, rate)[:longest]).window(0).bands

    def recording(self, samples: np.ndarray) -> Recording:
        """Return the spectrogram of float32 samples at 16 kHz, of any number from 1."""
        count = max(len(samples), self.num_samples)  # shorter sound is padded with silence before the transform
        padded, half = np.zeros(count + WINDOW, np.float32), WINDOW // 2
        padded[half : half + len(samples)] = samples
        padded[:half] = padded[2 * half : half : -1]  # reflections
        padded[-half:] = padded[-half - 2 : -2 * half - 2 : -1]
        window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
        frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[:-1:HOP][: count // HOP]
        bands = np.empty((self.num_mels, len(frames)), np.float32)
        for start in range(0, len(frames), _FRAMES_AT_ONCE):
            piece = frames[start : start + _FRAMES_AT_ONCE]
            power = np.abs(np.fft.rfft(piece * window)) ** 2  # [·, 201]
            bands[:, start : start + len(piece)] = np.log10(np.maximum(mel_filters(self.num_mels) @ power.T, 1e-10))
        np.maximum(bands, bands.max() - 8.0, out=bands)
        bands += 4.0
        bands /= 4.0
        num_frames = len(frames) if len(samples) > self.num_samples else -(-len(samples) // HOP)
        return Recording(bands, num_frames, self.num_frames)


class Spectrogram(NamedTuple):
    """The input of an encoder, as `multi_modal_data`."""

    bands: np.ndarray  # float32[M, F]


@dataclass(frozen=True)
class Recording:
    """The spectrogram of a sound of any length."""

    bands: np.ndarray  # float32[M, ·]
    num_frames: int  # without the silence after it
    num_window: int  # F, frames that an encoder reads

    def window(self, start: int) -> Spectrogram:
        """Return the frames from `start` on, padded with zeros, as transformers pads them."""
        piece = self.bands[:, start : start + self.num_window]
        missing = self.num_window - piece.shape[1]
        return Spectrogram(np.ascontiguousarray(np.pad(piece, ((0, 0), (0, missing))) if missing else piece))


def samples_of(given: Any) -> tuple[np.ndarray, int]:
    """Return float32 samples and their rate: of an array at 16 kHz, or a pair of array and rate; raise UserError."""
    rate: Any = RATE
    if isinstance(given, tuple) and len(given) == 2:
        given, rate = given
    if isinstance(rate, bool) or not isinstance(rate, int | float | np.number) or not 1 <= rate <= MOST_RATE:
        raise UserError(f"A sampling rate must be from 1 to {MOST_RATE} per second, got {rate!r:.80}.", PARAMETER)
    if not isinstance(given, np.ndarray | Sequence) or isinstance(given, str | bytes):
        raise UserError(f"Sound must be an array of samples, got {type(given).__name__}.", PARAMETER)
    try:
        samples = np.asarray(given)
    except (TypeError, ValueError):
        samples = np.zeros((0, 0))
    if samples.ndim != 1 or not len(samples) or not np.issubdtype(samples.dtype, np.floating):
        raise UserError("Sound must be one array of floats from -1 to 1: average the channels.", PARAMETER)
    if not np.isfinite(samples).all():
        raise UserError("Sound must be finite numbers.", PARAMETER)
    return samples.astype(np.float32), int(rate)


def ratio_of(rate: int, wanted: int = RATE) -> tuple[int, int]:
    """Return the numbers of samples at the wanted rate and at another in an equal time.

    Unusual rates become the nearest ratio with a denominator of at most 1,000, which bounds the length of filters.
    """
    ratio = Fraction(wanted, rate).limit_denominator(MOST_DENOMINATOR)
    return ratio.numerator, ratio.denominator


def at_rate(samples: np.ndarray, rate: int, wanted: int = RATE) -> np.ndarray:
    """Return samples at another rate, by a polyphase filter."""
    if rate == wanted:
        return samples
    from scipy.signal import resample_poly

    return np.asarray(resample_poly(samples, *ratio_of(rate, wanted)), np.float32)


def read_wav(data: bytes) -> tuple[np.ndarray, int]:
    """Return the samples of a WAV file, float32 from -1 to 1 with channels averaged, and their rate."""
    blocks, rate = wav_blocks(data)
    return np.concatenate([np.zeros(0, np.float32), *blocks]), rate


def wav_blocks(data: bytes) -> tuple[Iterator[np.ndarray], int]:
    """Return a WAV file's samples, as `read_wav`, in blocks, each of which holds the interpreter briefly."""
    try:
        file = wave.open(io.BytesIO(data))
        size, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
    except UNREADABLE as error:
        raise _refused(error) from error
    if size not in (1, 2, 3, 4) or channels < 1:
        raise UserError(f"WAV samples of {size} bytes are not supported.", "file")
    if not 1 <= rate <= MOST_RATE:
        raise UserError(f"A WAV file's rate must be from 1 to {MOST_RATE} per second, got {rate}.", "file")
    return _blocks(file, size, channels), rate


def _blocks(file: wave.Wave_read, size: int, channels: int) -> Iterator[np.ndarray]:
    try:
        while raw := file.readframes(max(1, _SAMPLES_AT_ONCE // channels)):
            yield _values(raw, size, channels)
    except UNREADABLE as error:
        raise _refused(error) from error


def _refused(error: Exception) -> UserError:
    return UserError(f"The sound is no WAV file of integers: {str(error) or 'it ends early'}.", "file")


def _values(raw: bytes, size: int, channels: int) -> np.ndarray:
    raw = raw[: len(raw) // (size * channels) * size * channels]
    if size == 1:  # unsigned
        values = np.frombuffer(raw, np.uint8).astype(np.float32) / 128 - 1
    else:
        wide = np.zeros((len(raw) // size, 4), np.uint8)
        wide[:, 4 - size :] = np.frombuffer(raw, np.uint8).reshape(-1, size)
        values = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    return values.reshape(-1, channels).mean(axis=1)


@lru_cache(maxsize=4)
def mel_filters(count: int) -> np.ndarray:
    """Return triangular filters of equal area, [count, 201], on Slaney's scale: linear below 1 kHz."""

    def of_mel(mels: np.ndarray) -> np.ndarray:
        return np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(np.log(6.4) / 27 * (mels - 15)))

    top = 15 + 27 / np.log(6.4) * np.log(RATE / 2 / 1000)
    corners = of_mel(np.linspace(0, top, count + 2))
    bins = np.linspace(0, RATE // 2, WINDOW // 2 + 1)
    slopes = corners[:, None] - bins  # [count + 2, 201]
    widths = np.diff(corners)[:, None]
    filters = np.maximum(0, np.minimum(-slopes[:-2] / widths[:-1], slopes[2:] / widths[1:]))
    filters *= 2 / (corners[2:] - corners[:-2])[:, None]
    filters.flags.writeable = False
    return filters
