"""Hostile sounds are refused with an error that names them, before they cost memory; usual ones are decoded."""

from __future__ import annotations

import base64
import io
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from jaxllm.errors import UserError
from jaxllm.media import sound_files, sources
from jaxllm.media.image_part import ImagePart
from jaxllm.media.messages import take_images
from jaxllm.media.sound import RATE
from jaxllm.media.sounds import SoundProcessor
from jaxllm.media.sources import Sources
from tests.support.sound_models import NUM_MELS, SECONDS, sound, wav

pytestmark = pytest.mark.usefixtures("decoders_in_process")

PROCESSOR = SoundProcessor(placeholder=9, num_mels=NUM_MELS, num_states=100, joined=2, reads_silence=False)


def url_of(data: bytes, kind: str = "audio/wav") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def inline(data: bytes | str, form: Any = "wav") -> dict[str, Any]:
    text = data if isinstance(data, str) else base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": text, "format": form}}


def linked(url: Any) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def stored(form: str, seconds: float = 1.0, rate: int = RATE) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.resize(sound(3), int(seconds * rate)), rate, format=form)
    return buffer.getvalue()


def claiming(count: int) -> bytes:
    """Return a WAV file with a header that claims `count` bytes of samples."""
    return wav(1)[:40] + struct.pack("<I", count) + b"\0" * 99


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "long": (inline(stored("WAV", SECONDS + 0.1)), "more than 2 s"),
    "long and compressed": (inline(stored("FLAC", 600), "flac"), "more than 2 s"),
    "long and slow": (linked(url_of(stored("MP3", 600, 8000))), "more than 2 s"),
    "short": (inline(stored("WAV", 0.01)), "at least 0.020 s"),
    "empty": (inline(claiming(0)[:44]), "no sound"),
    "cut off": (inline(wav(1)[:40]), r"WAV"),
    "noise": (inline(b"RIFF" + bytes(range(200))), "not WAV, FLAC, OGG or MP3"),
    "nothing": (inline(""), "not WAV"),
    "no file of sound": (linked(url_of(b"<html>")), "not WAV"),
    "too large": (inline(b"\0" * 2100), "a sound may have 2048 bytes"),
    "another kind": (linked(url_of(wav(1), "image/png")), "data:audio"),
    "bad base64": (inline("@@@@"), "base64"),
    "no data": ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio.data must be"),
    "no object": ({"type": "input_audio", "input_audio": "a"}, "input_audio.data must be"),
    "unknown format": (inline(wav(1), "pcm16"), "input_audio.format must be one of wav, mp3, flac, ogg"),
    "no format": (inline(wav(1), ["wav"]), "input_audio.format must be one of"),
    "the web": (linked("https://example.com/a.wav"), "not an allowed source of sounds"),
    "a file": (linked("file:///etc/passwd"), "may be read"),
    "no text": (linked(7), "must be a text"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_sound_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(*_: object, **__: object) -> None:
        raise AssertionError("it is decoded")

    part, why = HOSTILE[name]
    if name.startswith("long"):  # by its header
        monkeypatch.setattr(sound_files, "resampled", decoded)
    if name == "too large":
        monkeypatch.setattr(sources, "SOUNDS", sources.SOUNDS._replace(most=2048))
        monkeypatch.setattr("jaxllm.media.sounds.SOUNDS", sources.SOUNDS)
        monkeypatch.setattr(base64, "b64decode", decoded)
    messages = [{"role": "user", "content": [{"type": "text", "text": "?"}, part]}]
    with pytest.raises(UserError, match=why) as error:
        take_images(messages, PROCESSOR, Sources(), 4)
    assert "messages[0].content[1]" in str(error.value) and error.value.parameter == "messages"


def test_only_samples_that_a_header_counts_are_read() -> None:
    data = bytearray(stored("WAV", 60))
    at = data.index(b"data") + 4
    data[at : at + 4] = struct.pack("<I", 100)  # bytes
    assert PROCESSOR.decode(bytes(data), "it")[0].shape == (50,)


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3"])
def test_usual_files_are_decoded(form: str, tmp_path: Path) -> None:
    """Test every form of a part, another rate, and a wrong but harmless format."""
    data = stored(form)
    (tmp_path / "a").write_bytes(data)
    parts = [
        inline(data, form.lower()),
        inline(data, "wav"),
        linked(url_of(data, "audio/any")),
        linked(f"file://{tmp_path}/a"),
        {"type": "audio_url", "audio_url": url_of(data)},
        {"type": "audio", "audio": data},
    ]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "b"}]}]
    found, sounds = take_images(messages, PROCESSOR, Sources(folder=str(tmp_path)), 6)
    assert len({each.digest for each in sounds}) == 1 and sounds[0].num_tokens in (25, 26)
    assert [part["type"] for part in found[0]["content"]] == ["audio"] * 6 + ["text"]
    assert isinstance(found[0]["content"][0], ImagePart)
    with pytest.raises(UserError, match=r"messages\[0\].content\[5\]: a request may have 5 sounds"):
        take_images(messages, PROCESSOR, Sources(folder=str(tmp_path)), 5)
    (slow,) = PROCESSOR.prepare([PROCESSOR.decode(stored(form, 1.0, 8000), "it")])
    assert slow.num_tokens in (25, 26) and slow.digest != sounds[0].digest


def test_digests_depend_on_samples_and_settings() -> None:
    given = sound(5)
    other = given.copy()
    other[700] += 0.01
    (first,), (again,), (changed,) = (PROCESSOR.prepare([each]) for each in (given, given.copy(), other))
    assert first.digest == again.digest != changed.digest
    assert replace(PROCESSOR, joined=1).prepare([given])[0].digest != first.digest
    assert replace(PROCESSOR, context=99).prepare([given])[0].digest == first.digest


def test_sounds_must_fit_into_the_context() -> None:
    small, given = replace(PROCESSOR, context=60), sound(0)
    small.prepare([given])
    with pytest.raises(UserError, match="sounds have 100 tokens, and the model's context has 60"):
        small.prepare([given], earlier=small.prepare([given]))
    whole = replace(PROCESSOR, reads_silence=True, joined=4, context=60)
    assert whole.most_seconds == 4  # two windows of 25 tokens
    with pytest.raises(UserError, match="reads at most 4 s"):
        whole.prepare([np.zeros(4 * RATE + 1)])


def test_states_end_with_the_sound() -> None:
    """Test numbers of samples around a frame, a state and a token; frames equal those of the whole window."""
    (whole,) = PROCESSOR.prepare([np.pad(sound(0)[:20000], (0, SECONDS * RATE - 20000))])
    assert not whole.pixels[:, -1].any()
    for count, num_states in ((321, 2), (480, 2), (640, 2), (641, 3), (960, 3), (961, 4), (20000, 63)):
        given = sound(0)[:count]
        (own,) = PROCESSOR.prepare([given])
        assert own.num_tokens == num_states // 2 and own.pixels.shape == (NUM_MELS, 2 * num_states + 1)
    np.testing.assert_array_equal(own.pixels, whole.pixels[:, : own.pixels.shape[1]])


def test_a_list_is_of_sounds_or_samples() -> None:
    given = sound(1)
    for one in (given, given.tolist(), (given, RATE), (given.tolist(), 8000.0)):
        assert PROCESSOR.listed(one) == [one] or PROCESSOR.listed(one)[0] is one
    assert len(PROCESSOR.listed([given, (given, RATE)])) == len(PROCESSOR.listed((given, given))) == 2
    assert PROCESSOR.listed([given.tolist()] * 3) == [given.tolist()] * 3
