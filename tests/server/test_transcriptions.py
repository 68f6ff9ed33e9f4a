"""Transcriptions over HTTP, with the unmodified `openai` client: equal to those of the engine, in every form."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from jaxllm import LLM
from jaxllm.config import EngineConfig
from jaxllm.embedded import SPEECH_DIR
from jaxllm.engine.features.speech import offline
from jaxllm.engine.features.speech.rules import rules_of
from jaxllm.engine.features.speech.transcription import Asked, Transcription, text_before
from jaxllm.media.sound_files import read_sound
from jaxllm_server.shared.options import ServerOptions
from tests.support.seq2seq_models import WINDOW, write_whisper
from tests.support.server_thread import ServerThread
from tests.support.sizes import SLOTS

pytestmark = pytest.mark.ci
SHORT, LONG = WINDOW - 999, WINDOW + 4321


def wav(num_samples: int, seed: int = 5) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(16000)
        samples = np.random.default_rng(seed).integers(-6000, 6000, num_samples)
        written.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    config = EngineConfig(model=str(write_whisper(tmp_path_factory.mktemp("whisper"))), **SLOTS)
    options = ServerOptions(
        port=0, grpc_port=0, served_model_name=("whisper",), max_audio_bytes=200_000, max_audio_seconds=4.0
    )
    site = ServerThread(config, options)
    yield site
    site.close()


@pytest.fixture(scope="module")
def client(site: ServerThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def due(site: ServerThread) -> dict[str, Transcription]:
    """Return transcriptions by an engine of this process."""
    with LLM(site.server.engine.config.model, **SLOTS) as llm:
        model = llm.engine.model
        rules, sound = rules_of(model), model.sources and model.sources.sound
        assert rules is not None and sound is not None
        asks = {
            "plain": (SHORT, Asked()),
            "english": (SHORT, Asked(language="en", before=text_before(model, "A cat."))),
            "timed": (SHORT, Asked(timestamps=True, scores=True, words=True)),
            "long": (LONG, Asked()),
            "translated": (SHORT, Asked(task="translate")),
        }
        made = {
            name: Transcription(model, rules, sound.recording(read_sound(wav(count))), asked)
            for name, (count, asked) in asks.items()
        }
        assert not offline.run(llm.engine, list(made.values()))
    return made


def test_answers_equal_the_engines(client: openai.OpenAI, due: dict[str, Transcription], site: ServerThread) -> None:
    ask = client.audio.transcriptions.create
    given: dict[str, Any] = {"model": "whisper", "file": ("a.wav", wav(SHORT))}
    answer = ask(**given)
    assert answer.text == due["plain"].text != "" and answer.usage.seconds == 1
    assert ask(**given, language="en", prompt="A cat.").text == due["english"].text
    assert ask(**given, response_format="text").strip() == due["plain"].text
    assert client.audio.translations.create(**given).text == due["translated"].text
    assert ask(model="whisper", file=("b.wav", wav(LONG))).text == due["long"].text
    verbose = ask(**given, response_format="verbose_json", timestamp_granularities=["word", "segment"])
    timed = due["timed"]
    assert verbose.text == timed.text and verbose.language == timed.language
    assert verbose.duration == round(timed.seconds, 2)
    assert len(verbose.segments) == len(timed.segments) > 1
    for found, own in zip(verbose.segments, timed.segments, strict=True):
        assert (found.tokens, found.text, found.seek) == (own.ids, own.text, own.seek)
        np.testing.assert_allclose((found.start, found.end), (own.start, own.end), atol=0.005)
        np.testing.assert_allclose(
            (found.avg_logprob, found.compression_ratio, found.no_speech_prob),
            (own.avg_logprob, own.compression_ratio, own.no_speech_prob),
            rtol=1e-4,
        )
        assert 0 < found.no_speech_prob < 1 and found.avg_logprob < 0
    assert "".join("".join(each.word.split()) for each in verbose.words) == "".join(verbose.text.split())
    assert [each.word for each in verbose.words] == [each.text for each in timed.words]
    for found, own in zip(verbose.words, timed.words, strict=True):
        np.testing.assert_allclose((found.start, found.end), (own.start, own.end), atol=0.005)
        assert found.start <= found.end
    words = ask(**given, response_format="verbose_json", timestamp_granularities=["word"])
    assert words.words == verbose.words and words.segments is None
    first = timed.segments[0]
    srt, vtt = (ask(**given, response_format=form) for form in ("srt", "vtt"))
    assert srt.startswith(f"1\n00:00:0{first.start:.3f} --> 00:00:0{first.end:.3f}\n".replace(".", ","))
    assert vtt.startswith(f"WEBVTT\n\n00:00:0{first.start:.3f} --> 00:00:0{first.end:.3f}\n")
    assert site.server.engine.metrics.compilations_after_ready == 0


@pytest.mark.parametrize(("name", "count"), [("plain", SHORT), ("long", LONG)])
def test_a_stream_is_the_whole_answer_in_pieces(
    client: openai.OpenAI, due: dict[str, Transcription], name: str, count: int
) -> None:
    events = list(client.audio.transcriptions.create(model="whisper", file=("a.wav", wav(count)), stream=True))
    deltas = [each.delta for each in events if each.type == "transcript.text.delta"]
    assert "".join(deltas) == events[-1].text == due[name].text and len(deltas) > 1
    assert events[-1].type == "transcript.text.done"
    assert events[-1].usage.output_tokens == due[name].num_output_tokens


@pytest.mark.parametrize(
    ("fields", "data", "parameter", "why"),
    [
        ({}, None, "file", "missing"),
        ({}, b"", "file", "WAV"),
        ({}, b"ID3 words", "file", "soundfile|FLAC"),
        ({}, wav(0), "file", "no sound"),
        ({}, wav(16000 * 5), "file", "more than 4 s"),
        ({}, b"RIFF" + bytes(200_000), "file", "at most 200000 bytes"),
        ({"model": "other"}, wav(99), "model", "does not exist"),
        ({"language": "fr"}, wav(99), "language", "de, en"),
        ({"response_format": "xml"}, wav(99), "response_format", "must be one of json"),
        ({"timestamp_granularities[]": "segment"}, wav(99), "timestamp_granularities", "verbose_json"),
        ({"timestamp_granularities[]": "hour"}, wav(99), "timestamp_granularities", "hour"),
        ({"temperature": "hot"}, wav(99), "temperature", "number"),
        ({"temperature": "-1"}, wav(99), "temperature", "non-negative"),
        ({"stream": "true", "response_format": "srt"}, wav(99), "stream", "srt"),
        ({"stream": "maybe"}, wav(99), "stream", "true or false"),
        ({"include[]": "logprobs"}, wav(99), "include", "not supported"),
        ({"prompt": "a" * 60000}, wav(99), "prompt", "at most"),
        ({"file": "a.wav"}, None, "file", "send a file"),
        ({"priority": "9" * 30}, wav(99), "priority", "32 bits"),
        ({"priority": "-5"}, wav(99), "priority", "scheduling_policy"),
    ],
)
def test_bad_requests_name_the_field(
    site: ServerThread, fields: dict[str, str], data: bytes | None, parameter: str, why: str
) -> None:
    files = {"file": ("a.wav", data)} if data is not None else {"other": ("b", b"")}
    answer = httpx.post(f"{site.url}/v1/audio/transcriptions", data=fields, files=files, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == (404 if parameter == "model" else 400), answer.text
    assert error["param"] == parameter and any(each in error["message"] for each in why.split("|")), error


def test_a_client_that_has_its_share_of_urgent_requests_gets_no_more(
    client: openai.OpenAI, site: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine would refuse the priority."""
    asked: list[tuple[int, int]] = []

    def priority_of(_client: str, priority: int, num_outputs: int) -> AbstractContextManager[int]:
        asked.append((priority, num_outputs))
        return nullcontext(0)

    monkeypatch.setattr(site.server.serving, "priority_of", priority_of)
    ask = client.audio.transcriptions.create
    assert ask(model="whisper", file=("a.wav", wav(SHORT)), extra_body={"priority": -5}).text
    assert asked == [(-5, 1)]


def test_other_bodies_are_refused(site: ServerThread) -> None:
    url = f"{site.url}/v1/audio/transcriptions"
    assert httpx.post(url, json={"model": "whisper"}).status_code == 415
    head = {"content-type": "multipart/form-data; boundary=b"}
    for body in (b"", b"--b", b"--b\r\n\r\n", b"--b\r\nA: b\r\n\r\nc\r\n--b--", b"--b--"):
        answer = httpx.post(url, content=body, headers=head)
        assert answer.status_code == 400, answer.text
    many = b"".join(b'--b\r\nContent-Disposition: form-data; name="%d"\r\n\r\n\r\n' % n for n in range(99)) + b"--b--"
    assert "at most 64 parts" in httpx.post(url, content=many, headers=head).json()["error"]["message"]
    assert httpx.post(url, content=b"x" * 500_000, headers=head).status_code == 413
    assert json.loads(httpx.get(f"{site.url}/health").content or b"{}") is not None


def test_the_included_recogniser_is_served() -> None:
    """The example of the package, whole, in segments and words, and as it grows."""
    config = EngineConfig(model="jaxllm-speech", **SLOTS)
    site, example = ServerThread(config, ServerOptions(port=0, grpc_port=0)), SPEECH_DIR / "example.wav"
    phrases = "set the alarm for two thirty on thursday", "switch off the fan in the bedroom"
    text = " ".join(phrases)
    try:
        with openai.OpenAI(base_url=f"{site.url}/v1", api_key="x", max_retries=0) as client:
            options: Any = {"model": "jaxllm-speech", "file": example}
            ask = client.audio.transcriptions.create
            assert ask(**options).text == text
            made: Any = ask(**options, response_format="verbose_json", timestamp_granularities=["word", "segment"])
            assert made.language == "en" and [word.word for word in made.words] == text.split()
            assert [segment.text.strip() for segment in made.segments] == [*phrases]
            assert made.segments[0].no_speech_prob < 0.1
            events = list(ask(**options, stream=True))
            assert events[-1].text == text and events[0].type == "transcript.text.delta"
    finally:
        site.close()
