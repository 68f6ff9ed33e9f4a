"""Small files that would take minutes or gigabytes are refused by name; each is one of a kind."""

from __future__ import annotations

import gc
import io
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from jaxllm.errors import UserError
from jaxllm.media import decoders, sound_files, videos
from jaxllm.media.films import read_film, read_stills
from jaxllm.media.images import decode
from jaxllm.media.sound_files import read_sound, resampled, seconds_of
from tests.fuzz.media_draws import with_hidden_frames
from tests.fuzz.media_files import recording
from tests.media.test_videos import processor
from tests.support.videos import jpegs

FLAT = np.zeros((4, 600, 800, 3), np.uint8)


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files")
def test_a_decoder_that_exceeds_a_limit_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test processor time, memory, a crash, and an end before frames are read; no process or file remains."""
    data, before = recording(FLAT, "mp4", "libx264"), open_files()
    long = with_hidden_frames(2000, 2000, 4_000)  # 4 s
    assert len(long) < 600_000
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"^it takes too much processor time: it may"):
        patch.setattr(decoders, "SECONDS", 1)
        list(read_film(long, "it").frames([0, 1]))
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"^it takes too much memory"):
        patch.setattr(decoders, "MOST_MEMORY", 16 << 20)
        list(read_film(data, "it").frames([0, 1]))
    at = data.index(b"stts") + 8  # the number of entries in a table: libav then asks for gigabytes
    with pytest.raises(UserError, match=r"^it takes too much memory"):
        read_film(data[:at] + b"\x0f\xff\xff\xff" + data[at + 4 :], "it")
    film = read_film(data, "it")
    assert len(list(film.frames([0, 0, 3]))) == len(list(film.frames([0, 1, 2]))) == 3
    with pytest.raises(UserError, match="can be read"):
        list(film.frames([1, 4]))
    unread = read_film(data, "it")
    assert open_files() > before
    del film, unread
    assert open_files() == before


def test_a_clock_bounds_the_wait_for_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "WAIT_FACTOR", 0)
    with pytest.raises(UserError, match=r"^it takes too much processor time"):
        read_film(recording(FLAT, "mp4", "libx264"), "it")


def test_frames_are_resized_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test files, and frames of a list that a request repeats."""
    monkeypatch.setattr(videos, "MOST_CHOSEN", 4 * 600 * 800 - 1)
    own = processor(True)
    for film in (read_film(recording(FLAT, "mp4", "libx264"), "it"), read_stills([_jpeg(FLAT[0])] * 2, "it")):
        with pytest.raises(UserError, match=r"^it: 4 frames of 800 × 600 pixels are chosen"):
            own.prepare(film, {"num_frames": 4, "do_sample_frames": True}, "it", "it")
        assert len(own.prepare(film, {"num_frames": 2, "do_sample_frames": True}, "it", "it").pairs) == 1


def _jpeg(frame: np.ndarray, **options: bool) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def test_scans_of_a_jpeg_are_bounded() -> None:
    """Test a file of which each 60 bytes take 30 ms."""
    data = _jpeg(np.zeros((5000, 5000), np.uint8), progressive=True)
    scan = data[data.rfind(b"\xff\xda") : -2]
    assert len(scan) < 60 and decode(data, "it").size == (5000, 5000)
    with pytest.raises(UserError, match=r"^it has more than 64 scans"):
        decode(data[:-2] + scan * 2000 + data[-2:], "it")
    assert jpegs(FLAT[:1])


def _sound(kind: str, values: np.ndarray, rate: int) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, values, rate, format=kind)
    return buffer.getvalue()


@pytest.mark.parametrize("tag", [b"", b"ID3\4\0\0\0\0\0\4abcd", b"ID3\4\0\0\0\0\0\0ID3\4\0\0\0\0\0\1x"])
@pytest.mark.parametrize("kind", ["FLAC", "MP3", "AIFF", "CAF", "AU", "NIST", "VOC"])
def test_only_documented_formats_reach_a_reader(kind: str, tag: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tag + _sound(kind, np.zeros(800, np.int16), 16000)
    if kind in ("FLAC", "MP3"):
        assert len(read_sound(data)) >= 800
        return
    with monkeypatch.context() as patch, pytest.raises(UserError, match="not WAV, FLAC, OGG or MP3"):
        patch.setattr(sound_files, "SoundProcess", None)
        read_sound(data)


def test_samples_of_a_sound_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test channels and rates, by the header and while decoding; long sounds may have more."""
    data = _sound("FLAC", np.zeros((48000, 4), np.int16), 48000)
    assert len(data) < 3000
    monkeypatch.setattr(sound_files, "MOST_SAMPLES", 150_000)
    for read in (seconds_of, read_sound):
        with pytest.raises(UserError, match="more than 150000 samples of all channels"):
            read(data, 1.0)
        read(data, 2.0)


def test_a_low_rate_is_resampled_in_little_memory() -> None:
    """Test that a sample of which each becomes 16,000 is not the unit of work, and that pieces fit to each other."""
    from scipy.signal import resample_poly

    block = np.random.default_rng(0).normal(0, 0.1, 300).astype(np.float32)
    found = np.concatenate(list(resampled(iter([block[:7], block[7:]]), 100)))
    np.testing.assert_allclose(found, resample_poly(block, 160, 1), atol=1e-5)
    tracemalloc.start()
    first = next(iter(resampled(iter([np.zeros(50_000, np.float32)]), 1)))
    assert len(first) < 1 << 20 and tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
