"""`jaxllm transcribe`: long files, languages, forms, and errors."""

from __future__ import annotations

import json
import wave
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM
from jaxllm.commands import cli, transcribe
from jaxllm.engine.features.speech import offline
from jaxllm.engine.features.speech.rules import rules_of
from jaxllm.engine.features.speech.subtitles import subtitles
from jaxllm.engine.features.speech.transcription import Asked, Transcription
from jaxllm.media.sound_files import read_sound
from tests.support.seq2seq_models import WINDOW, write_whisper
from tests.support.sizes import SLOTS, flags


def write_wav(path: Path, num_samples: int, seed: int) -> Path:
    samples = np.random.default_rng(seed).integers(-9000, 9000, num_samples).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(samples.tobytes())
    return path


@pytest.mark.ci
@pytest.mark.parametrize("has_times", [True, False])
def test_files_are_transcribed(
    has_times: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test files of one window and of several in one batch, by models with and without timestamps."""
    files = [write_wav(tmp_path / "a.wav", WINDOW + 4000, 1), write_wav(tmp_path / "b.wav", 5000, 2)]
    changes = {} if has_times else {"no_timestamps_token_id": None, "suppress_tokens": [*range(700)]}
    model = str(write_whisper(tmp_path / "model", **changes))
    arguments = ["transcribe", *map(str, files), "--model", model, *flags(SLOTS)]
    with LLM(model, **SLOTS) as llm:
        monkeypatch.setattr(transcribe, "open_llm", lambda options: nullcontext(llm))
        rules, sources = rules_of(llm.engine.model), llm.engine.model.sources
        assert rules is not None and sources is not None and sources.sound is not None

        def due_of(**asked: Any) -> list[Transcription]:
            recordings = [sources.sound.recording(read_sound(file.read_bytes())) for file in files]
            own = [Transcription(llm.engine.model, rules, each, Asked(**asked)) for each in recordings]
            assert not offline.run(llm.engine, own)
            return own

        due = due_of()
        assert due[0].segments[-1].seek > 0 and due[0].seek >= due[0].num_frames
        assert cli.main(arguments) == 0
        assert capsys.readouterr().out.splitlines() == [each.text for each in due]
        if has_times:
            due = due_of(language="de", task="translate", timestamps=True)
            assert cli.main([*arguments, "--language", "de", "--task", "translate", "--format", "json"]) == 0
            lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            texts = [(str(file), each.text) for file, own in zip(files, due, strict=True) for each in own.segments]
            assert [(line["file"], line["text"]) for line in lines] == [(name, text.strip()) for name, text in texts]
            assert cli.main([*arguments, "--format", "srt"]) == 0
            assert capsys.readouterr().out == "".join(
                subtitles(each.segments, "srt") for each in due_of(timestamps=True)
            )
        else:
            segments = due[0].segments
            assert [each.end for each in segments[:-1]] == [each.start for each in segments[1:]]
            assert cli.main([*arguments, "--format", "srt"]) == 1
            assert "writes no timestamps" in capsys.readouterr().err
        assert cli.main([*arguments, "--language", "fr"]) == 1
        assert "language 'fr' is not one of the model's: de, en" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["{text}", "--model", "x"], 1, "b.wav: The file is no"),
        (["{missing}", "--model", "x"], 1, "No such file"),
        (["{wav}", "--model", "x", "--format", "ass"], 2, "choose from"),
    ],
)
def test_errors_name_the_reason(
    arguments: list[str], code: int, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"wav": write_wav(tmp_path / "a.wav", 9, 1), "text": tmp_path / "b.wav", "missing": tmp_path / "c.wav"}
    places["text"].write_text("words")
    try:
        found = cli.main(["transcribe", *(each.format(**places) for each in arguments)])
    except SystemExit as exit:
        found = exit.code
    assert found == code
    assert why in capsys.readouterr().err
