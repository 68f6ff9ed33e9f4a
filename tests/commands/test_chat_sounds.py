"""`jaxllm chat --audio`."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.commands import cli
from tests.support.sizes import SLOTS, flags
from tests.support.sound_models import wav, write_sound_model
from tests.support.vision_models import image


@pytest.mark.ci
def test_a_chat_begins_with_a_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path = write_sound_model(tmp_path / "model"), tmp_path / "talk.wav"
    path.write_bytes(wav(3))
    command = ["chat", "--model", str(model), *flags(SLOTS), "--temperature", "0", "--max-tokens", "8"]
    monkeypatch.setattr("sys.stdin", io.StringIO("What is it?"))
    assert cli.main([*command, "--audio", str(path)]) == 0
    shown = capsys.readouterr().out
    with LLM(str(model), **SLOTS) as llm:
        content = [{"type": "audio", "audio": path.read_bytes()}, {"type": "text", "text": "What is it?"}]
        params = SamplingParams(temperature=0.0, max_tokens=8)
        (due,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    assert due.outputs[0].text.strip() and shown.strip() == due.outputs[0].text.strip()
    picture = tmp_path / "a.png"
    image(1).save(picture)
    for flag, given, why in (
        ("--image", picture, "reads no images; leave --image out"),
        ("--audio", tmp_path / "missing.wav", "cannot be read"),
    ):
        assert cli.main([*command, flag, str(given)]) != 0
        assert why in capsys.readouterr().err
