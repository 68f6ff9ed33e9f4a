"""Sound: WAV files of every width, other rates, and bands of known tones. tests/parity compares with transformers."""

from __future__ import annotations

import io
import wave

import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.media.sound import HOP, RATE, LogMel, at_rate, mel_filters, read_wav


def wav(samples: np.ndarray, width: int, rate: int = RATE) -> bytes:
    """Return a WAV file of samples from -1 to 1, [·, channels]."""
    whole = np.round(samples * (2 ** (8 * width - 1) - 1)).astype(np.int64) + (128 if width == 1 else 0)
    raw = b"".join(int(value).to_bytes(width, "little", signed=width > 1) for value in whole.ravel())
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(raw)
    return buffer.getvalue()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_channels_of_a_wav_file_are_averaged(width: int) -> None:
    samples = np.random.default_rng(width).uniform(-1, 1, (50, 2))
    found, rate = read_wav(wav(samples, width, 8000))
    assert rate == 8000 and found.dtype == np.float32
    np.testing.assert_allclose(found, samples.mean(axis=1), atol=2.0 ** (2 - 8 * min(width, 3)))


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_a_tone_stays_a_tone_at_another_rate(rate: int) -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
    found = at_rate(tone.astype(np.float32), rate)
    due = np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    assert len(found) == RATE
    np.testing.assert_allclose(found[1000:-1000], due[1000:-1000], atol=5e-3)


@pytest.mark.parametrize("hertz", [440, 1000, 3000, 7000])
def test_a_tone_is_loudest_in_its_band(hertz: int) -> None:
    tone = np.sin(2 * np.pi * hertz * np.arange(RATE) / RATE).astype(np.float32)
    bands = LogMel(80, 200).spectrogram((tone, RATE))
    assert bands.shape == (80, 200) and bands.dtype == np.float32
    bins = np.argmax(mel_filters(80), axis=1) * RATE / 400
    loudest = bins[np.argmax(bands[:, 10 : RATE // HOP - 10], axis=0)]
    assert (np.abs(loudest - hertz) < 40 + hertz / 12).all()
    assert (bands[:, 110:] == bands.min()).all(), "the rest is silence"


@pytest.mark.parametrize("rate", [0, 384001, 2**32 - 1])
def test_a_rate_beyond_the_limits_is_refused(rate: int) -> None:
    data = bytearray(wav(np.zeros((4, 1)), 2))
    data[24:28] = rate.to_bytes(4, "little")
    with pytest.raises(UserError, match="rate must be from 1"):
        read_wav(bytes(data))


@pytest.mark.parametrize("data", [b"", b"RIFF", b"ID3" * 99, wav(np.zeros((4, 1)), 2)[:30]])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(UserError, match=r"no WAV file of integers: .*\w\.$"):
        read_wav(data)
