"""Files of sound: pieces resampled as a whole, lengths before decoding, and other formats by soundfile."""

from __future__ import annotations

import io
import wave

import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.media import sound_files
from jaxllm.media.sound import at_rate
from jaxllm.media.sound_files import read_sound, resampled, seconds_of

pytestmark = pytest.mark.usefixtures("decoders_in_process")


@pytest.mark.parametrize("rate", [8000, 16000, 44100, 48000, 11025, 16002, 31999, 7])
def test_pieces_are_resampled_as_the_whole(rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound_files, "FRAMES", 5000)
    rng = np.random.default_rng(rate)
    samples = rng.standard_normal(50 if rate == 7 else 100_001).astype(np.float32)
    cuts = np.sort(rng.integers(0, len(samples), 9))
    found = np.concatenate(list(resampled(np.split(samples, cuts), rate)))
    due = at_rate(samples, rate)
    assert len(found) == len(due)
    np.testing.assert_allclose(found, due, atol=2e-5)


def wav(rate: int, count: int, channels: int = 2, size: int = 2) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(channels)
        written.setsampwidth(size)
        written.setframerate(rate)
        written.writeframes(bytes(range(1, 2)) * (count * channels * size))
    return file.getvalue()


def test_lengths_are_checked_before_decoding() -> None:
    data = wav(8000, 16000)
    assert seconds_of(data, 2.0) == 2.0 and len(read_sound(data)) == 32000
    assert seconds_of(data[:1044]) == pytest.approx(261 / 8000), "the header names more than there is"
    with pytest.raises(UserError, match=r"more than 1\.5 s"):
        seconds_of(data, 1.5)
    with pytest.raises(UserError, match=r"more than 1\.5 s"):
        read_sound(data, 1.5)
    for given, why in ((b"", "soundfile|damaged"), (b"RIFF1234WAVE", "soundfile|damaged"), (wav(8000, 0), "no sound")):
        with pytest.raises(UserError, match=why):
            read_sound(given)


@pytest.mark.parametrize("form", ["FLAC", "OGG", "MP3"])
def test_other_formats_are_read_by_soundfile(form: str) -> None:
    library = pytest.importorskip("soundfile")
    samples = (0.3 * np.sin(np.arange(44100) / 30)).astype(np.float32)
    file = io.BytesIO()
    library.write(file, np.stack([samples, samples], axis=1), 44100, format=form)
    data = file.getvalue()
    assert seconds_of(data) == pytest.approx(1.0, abs=0.06)
    found, due = read_sound(data), at_rate(samples, 44100)
    size = min(len(found), len(due)) - 2000
    start = max(range(0, 2500), key=lambda at: float(found[at : at + 400] @ due[1000:1400])) - 1000
    start = 0 if form != "MP3" else start  # an encoder may delay sound
    assert np.corrcoef(found[1000 + start : size + start], due[1000:size])[0, 1] > 0.99
    with pytest.raises(UserError, match="damaged"):
        read_sound(data[:40])
