"""Videos: files in every format, frames in memory, choice of frames, bounds, and settings that are refused."""

from __future__ import annotations

import io
import sys
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxllm.errors import UserError
from jaxllm.media import films
from jaxllm.media.films import Film, film_of, read_film, read_stills
from jaxllm.media.sources import Sources
from jaxllm.media.video_messages import take_videos
from jaxllm.media.videos import VideoProcessor, read_videos
from tests.support.videos import ANIMATIONS, CONTAINERS, animation, jpegs, recording, url

pytestmark = pytest.mark.usefixtures("decoders_in_process")

FRAMES = np.random.default_rng(0).integers(0, 256, (7, 1, 1, 3), np.uint8).repeat(48, axis=1).repeat(64, axis=2)


def processor(is_stamped: bool = False, **settings: Any) -> VideoProcessor:
    bounds = {"shortest_edge": 14**2 * 4, "longest_edge": 14**2 * 40}
    given: dict[str, Any] = {"patch_size": 7, "size": bounds, **settings}
    return read_videos(given, placeholder=9, around=(7, 8), is_stamped=is_stamped, rate=2.0, patch=7, merge=2)


def shown(film: Film) -> np.ndarray:
    return np.stack(list(film.frames(range(film.count))))


@pytest.mark.parametrize("kind", [*ANIMATIONS, *CONTAINERS])
def test_a_file_has_its_frames(kind: str) -> None:
    """Test size, number, rate and colors of frames, and that a cut file is refused or has fewer frames."""
    data = animation(FRAMES, kind) if kind in ANIMATIONS else recording(FRAMES, kind)
    film = read_film(data, "it")
    assert (film.size, film.count, film.fps) == ((64, 48), 7, pytest.approx(4.0))
    assert np.abs(shown(film).astype(int) - FRAMES).mean() < (1 if kind in ANIMATIONS else 12)
    np.testing.assert_array_equal(np.stack(list(film.frames([1, 1, 4]))), shown(film)[[1, 1, 4]])
    for size in (0, 3, 12, len(data) // 3, len(data) - 30):
        try:
            cut = read_film(data[:size], "it")
            assert 1 <= len(shown(cut)) <= 7
        except UserError as error:
            assert str(error).startswith("it ")


def test_urls_of_videos_are_read() -> None:
    """Test files, JPEGs with commas between, and refusals that name the part."""
    own: Any = type("Own", (), {"videos": None})
    messages: Any = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": jpegs(FRAMES)}}]}]
    assert take_videos(messages, None, Sources(), 1, {}) == (messages, []) and own.videos is None
    found = Sources().read_video(jpegs(FRAMES), "it")
    assert isinstance(found, list)
    film = read_stills(found, "it")
    assert film.count == 7 and np.abs(shown(film).astype(int) - FRAMES).max() < 12
    assert Sources().read_video(url(b"abc", "video/mp4"), "it") == b"abc"
    for wrong, why in (
        (5, "must be a text"),
        ("data:text/html;base64,AAAA", "data:video"),
        ("data:video/mp4,AAAA", "data:video"),
        ("data:video/mp4;base64,A", "invalid base64"),
        ("data:video/jpeg;base64,AAAA,*", "invalid base64"),
        ("data:video/jpeg;base64," + "," * films.MOST_FRAMES, "more than 65536 frames"),
        ("http://localhost/a.mp4", "not an allowed source of videos"),
        ("file:///etc/passwd", "may be read"),
    ):
        with pytest.raises(UserError, match=why):
            Sources().read_video(wrong, "it")


def test_work_is_bounded_before_frames_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test sizes, lengths and bytes, and that a video beyond the context takes no memory."""
    wide = np.zeros((2, 14, 5000, 3), np.uint8)
    with pytest.raises(UserError, match="200 times the other"):
        read_film(animation(wide, "GIF"), "it")
    data = animation(FRAMES, "PNG")
    for name, most, why in (
        ("MOST_FRAMES", 6, "7 frames"),
        ("MOST_CELLS", 6, "7 frames"),
        ("MOST_ANIMATED", 20_000, "pixels in"),
        ("MOST_BYTES", 9, "bytes"),
    ):
        with monkeypatch.context() as patch, pytest.raises(UserError, match=why):
            patch.setattr(films, name, most)
            read_film(data, "it")
    many = animation(FRAMES, "GIF")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="too many frames"):
        patch.setattr(films, "MOST_CELLS", 5)
        read_film(many, "it")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="pixels in"):
        patch.setattr(films, "MOST_DECODED", 20_000)
        read_film(recording(FRAMES, "mp4"), "it")
    film = film_of([np.zeros((800, 800, 3), np.uint8)] * 60_000, "it", "it")
    tracemalloc.start()
    with pytest.raises(UserError, match=r"it: 60000 frames have 30000 × \d+ tokens"):
        replace(processor(), context=512).prepare(film, {}, "it", "it")
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "must be a uint8 array"),
        ("a", "must be a uint8 array"),
        (np.zeros((3, 4, 3), np.uint8), "must be a uint8 array"),
        (np.zeros((2, 4, 4, 3), np.float32), "PIL image"),
        ([Image.new("RGB", (4, 4)), Image.new("RGB", (4, 5))], "different sizes"),
        ((FRAMES, {"fps": 0}), "fps must be"),
        ((FRAMES, {"frames_indices": [1, 2]}), "7 numbers"),
        ((FRAMES, {"total_num_frames": 9}), "total_num_frames"),
        ((FRAMES, {"do_sample_frames": 1}), "do_sample_frames"),
        (b"\x00\x00\x00\x20ftypisom" + bytes(99), "cannot be read|can be read"),
        (b"RIFF\x00\x00\x00\x00AVI " + bytes(99), "can be read"),
        (b"#EXTM3U\nfile:///etc/passwd", "can be read"),
    ],
)
def test_a_wrong_video_is_refused(given: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        processor().prepare(film_of(given, "it", "it"), {}, "it", "it")


def test_a_file_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    data = recording(FRAMES, "mp4")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match="need PyAV: pip install 'jaxllm\\[media\\]'"):
        read_film(data, "it")


def test_frames_are_chosen_by_rate_and_number() -> None:
    """Test files, frames in memory, those that a caller has chosen, and options that are refused."""
    own, data = processor(True), animation(FRAMES.repeat(4, axis=0), "WEBP", 250)  # 28 frames, equal ones joined

    def count(given: Any, **options: Any) -> int:
        return len(own.prepare(film_of(given, "it", "it"), options, "it", "it").pairs)

    assert count(data, num_frames=6) == 3 and count(data, fps=100) == (read_film(data, "it").count + 1) // 2
    assert count(FRAMES) == 2 and count(FRAMES, do_sample_frames=False) == 4  # 24 a second, at least 4
    chosen = {"fps": 2.0, "frames_indices": [0, 5, 10, 15, 20, 25, 30], "total_num_frames": 40}
    found = own.prepare(film_of((FRAMES, chosen), "it", "it"), {}, "it", "it")
    assert found.seconds == (1.25, 6.25, 11.25, 15.0)
    found = processor().prepare(film_of((FRAMES, chosen), "it", "it"), {}, "it", "it")
    assert found.step == pytest.approx(2.0 * 2 / (2.0 * 7 / 40))
    plain = processor().prepare(film_of(FRAMES, "it", "it"), {"fps": 1}, "it", "it")
    assert plain.step == 4.0
    with pytest.raises(UserError, match="has one frame"):
        count(FRAMES[:1])
    assert len(processor().prepare(film_of(FRAMES[:1], "it", "it"), {}, "it", "it").pairs) == 1
    for wrong in ({"fps": 0}, {"fps": True}, {"num_frames": 1.5}, {"num_frames": 2, "fps": 1}, {"size": 3}):
        with pytest.raises(UserError, match="mm_processor_kwargs"):
            count(FRAMES, **wrong)


def test_digests_cover_pixels_times_and_places() -> None:
    """Test that equal pairs have equal digests only where their positions are equal."""
    film = FRAMES[[0, 1, 0, 1]]

    def digests(own: VideoProcessor, given: Any) -> list[bytes]:
        prepared = own.prepare(film_of(given, "it", "it"), {"do_sample_frames": False}, "it", "it")
        return [pair.digest for pair in prepared.pairs]

    first, second = digests(processor(), (film, {"fps": 2.0}))
    assert first != second
    assert digests(processor(), (film, {"fps": 1.0}))[0] != first == digests(processor(), (film, {"fps": 2.0}))[0]
    first, second = digests(processor(True), (film, {"fps": 2.0}))  # texts name the times
    assert first == second == digests(processor(True), (film, {"fps": 1.0}))[0]
    assert digests(processor(True), (FRAMES[[1, 0]], {"fps": 2.0}))[0] != first


@pytest.mark.parametrize(
    "changes",
    [
        {"video_processor_type": "LlavaOnevisionVideoProcessor"},
        {"patch_size": 16},
        {"temporal_patch_size": 1},
        {"do_resize": False},
        {"do_center_crop": True},
        {"size": {"height": 3, "width": 3}},
        {"size": {"longest_edge": 1 << 40}},
        {"max_pixels": 100},
        {"resample": 1},
        {"max_video_tokens": 0},
        {"unknown": 2},
    ],
    ids=str,
)
def test_an_unknown_setting_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"video_preprocessor_config\.json"):
        processor(**changes)


def test_an_image_is_a_video_of_one_frame() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (20, 30)).save(buffer, "PNG")
    assert read_film(buffer.getvalue(), "it").count == 1
