"""Preprocess sounds as parts of prompts: spectrograms as transformers' WhisperFeatureExtractor makes them.

M mel bands, F frames, two of a state of the tower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, ClassVar

import numpy as np

from jaxllm.errors import UserError
from jaxllm.media.processor import Measured, Prepared, Processor, Settings
from jaxllm.media.sound import HOP, RATE, WINDOW, LogMel, at_rate, ratio_of, samples_of
from jaxllm.media.sound_files import MOST_BYTES, read_sound
from jaxllm.media.sources import SOUNDS, Sources, from_base64

MOST_SECONDS = 1800  # of a file
FORMATS = ("wav", "mp3", "flac", "ogg")
_KIND = "WhisperFeatureExtractor"
_UNREAD = frozenset(("processor_class", "return_attention_mask"))
_AFTER = 3  # frames of silence, so that no reflection reaches the frame after a sound


@dataclass(frozen=True, kw_only=True)
class SoundProcessor(Processor):
    """Sounds of at most `num_states` states, or windows of `num_states` if the tower reads the silence after them."""

    kind: ClassVar[str] = "audio"
    noun: ClassVar[str] = "sound"
    num_mels: int
    num_states: int
    joined: int  # states of a token
    reads_silence: bool

    @property
    def most_tokens(self) -> int:
        return self.num_states // self.joined

    @property
    def most_seconds(self) -> float:
        """Return the length of the longest sound."""
        windows = 1
        if self.reads_silence:
            windows = MOST_SECONDS * RATE // self._num_samples
            windows = windows if self.context is None else min(windows, self.context // self.most_tokens)
        return max(1, windows) * self._num_samples / RATE

    @property
    def _num_samples(self) -> int:
        return 2 * self.num_states * HOP

    def decode(self, data: bytes, name: str, parameter: str = "messages") -> tuple[np.ndarray, int]:
        """Return a file's samples and rate; raise UserError, naming `name`, if it is invalid or too long."""
        if len(data) > MOST_BYTES:
            raise UserError(
                f"{name} has {len(data)} bytes; a sound may have {MOST_BYTES}. Send a shorter one.", parameter
            )
        try:
            return read_sound(data, self.most_seconds), RATE
        except UserError as error:
            raise UserError(f"{name}: {error}", parameter) from error

    def measure(self, image: Any, name: str, parameter: str) -> Measured:
        """Check an array of samples at 16 kHz, or a pair of array and rate."""
        try:
            samples, rate = samples_of(image)
        except UserError as error:
            raise UserError(f"{name}: {error}", parameter) from error
        if len(samples) > self.most_seconds * rate:
            raise UserError(
                f"{name} has {len(samples) / rate:.1f} s, and the model reads at most {self.most_seconds:g} s of a "
                "sound; cut it into pieces.",
                parameter,
            )
        up, down = ratio_of(rate)
        count = min(-(-len(samples) * up // down), round(self.most_seconds * RATE))
        if self.reads_silence:
            windows = -(-count // self._num_samples)
            return Measured(windows * self.most_tokens, None, partial(self._windows, samples, rate, windows))
        num_states = -(-count // (2 * HOP))
        if num_states < self.joined:
            least = (2 * (self.joined - 1) * HOP + 1) / RATE
            raise UserError(f"{name} has {count / RATE:.3f} s; a sound must have at least {least:.3f} s.", parameter)
        return Measured(num_states // self.joined, None, partial(self._bands, samples, rate, count, num_states))

    def listed(self, given: Any) -> list[Any]:
        """Return the sounds of a list, or the only one: samples, or a tuple with their rate."""
        is_samples = isinstance(given, list) and bool(given) and isinstance(given[0], int | float | np.number)
        is_pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], int | float | np.number)
        return [given] if is_samples or is_pair else super().listed(given)

    def pieces(self, image: Prepared) -> Iterator[tuple[int, Prepared]]:
        if not self.reads_silence:
            yield 0, image
            return
        for number, bands in enumerate(image.pixels):
            digest = sha256(repr((self, bands.shape)).encode())
            digest.update(bands.tobytes())
            yield number * self.most_tokens, Prepared(digest.digest(), self.most_tokens, bands)

    def _bands(self, samples: np.ndarray, rate: int, count: int, num_states: int) -> np.ndarray:
        """Return the frames of the states and the next one, float32[M, 2 · states + 1]; zeros follow a whole window."""
        own = at_rate(samples, rate)[:count]
        num_frames = min(2 * num_states + 1 + _AFTER, 2 * self.num_states)
        bands = LogMel(self.num_mels, num_frames).recording(own).bands[:, : 2 * num_states + 1]
        missing = 2 * num_states + 1 - bands.shape[1]
        return np.ascontiguousarray(np.pad(bands, ((0, 0), (0, missing))) if missing else bands)

    def _windows(self, samples: np.ndarray, rate: int, windows: int) -> np.ndarray:
        """Return the frames of each window, float32[windows, M, F + 1], the last one zeros."""
        num_frames = 2 * self.num_states
        own = at_rate(samples, rate)[: windows * self._num_samples]
        bands = LogMel(self.num_mels, windows * num_frames).recording(own).bands
        parts = bands.reshape(self.num_mels, windows, num_frames).transpose(1, 0, 2)
        return np.pad(parts, ((0, 0), (0, 0), (0, 1)))


def read_sounds(
    settings: Mapping[str, Any], placeholder: int, num_mels: int, num_states: int, joined: int, reads_silence: bool
) -> SoundProcessor:
    """Return the processor of preprocessor_config.json; the other arguments are the model's.

    Raises UserError, naming the key, for unsupported settings.
    """
    own = Settings(settings)
    num_frames = 2 * num_states
    for key, default, wanted in (
        ("feature_extractor_type", _KIND, _KIND),
        ("feature_size", 80, num_mels),
        ("sampling_rate", RATE, RATE),
        ("hop_length", HOP, HOP),
        ("n_fft", WINDOW, WINDOW),
        ("chunk_length", 30, num_frames * HOP / RATE),
        ("nb_max_frames", num_frames, num_frames),
        ("n_samples", num_frames * HOP, num_frames * HOP),
        ("padding_side", "right", "right"),
        ("padding_value", 0.0, 0.0),
        ("dither", 0.0, 0.0),
        ("do_normalize", False, False),
    ):
        given = own.take(key, default)
        if given != wanted:
            raise own.error(key, given, f"{wanted}, the model's,")
    own.finish(_UNREAD)
    return SoundProcessor(
        placeholder=placeholder, num_mels=num_mels, num_states=num_states, joined=joined, reads_silence=reads_silence
    )


def sound_of(part: Mapping[str, Any], name: str, sources: Sources, processor: SoundProcessor) -> Any:
    """Return the sound of a content part; raise UserError, naming `name`, if it is refused or invalid.

    A part is {"type": "input_audio", "input_audio": {"data": base64, "format": …}}, {"type": "audio_url", "audio_url":
    {"url": …}}, or {"type": "audio", "audio": …} with samples, a pair of samples and rate, or a file's bytes. `format`
    has no effect.
    """
    kind = part["type"]
    given = part.get("audio")
    if kind == "audio" and given is not None:
        return processor.decode(given, name) if isinstance(given, bytes) else given
    if kind == "input_audio":
        return processor.decode(_inline(part.get(kind), f"{name}.{kind}"), name)
    given = part.get("audio_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    return processor.decode(sources.read_file(url, f"{name}.audio_url", SOUNDS), name)


def _inline(given: Any, name: str) -> bytes:
    given = given if isinstance(given, Mapping) else {}
    data, form = given.get("data"), given.get("format", "wav")
    if not isinstance(data, str):
        raise UserError(f"{name}.data must be a file in base64, not {type(data).__name__}.", "messages")
    if form not in FORMATS:
        raise UserError(f"{name}.format must be one of {', '.join(FORMATS)}, got {form!r:.80}.", "messages")
    return from_base64(data, f"{name}.data", SOUNDS)
