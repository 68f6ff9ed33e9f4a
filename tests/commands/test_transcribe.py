"""`jaxllm transcribe`: pieces of long files, languages, and errors."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.commands import cli
from jaxllm.commands.transcribe import cuts
from jaxllm.media.sound import read_wav
from tests.support.seq2seq_models import NUM_FRAMES, VOCABULARY, write_seq2seq
from tests.support.sizes import SLOTS, flags

LONGEST = 160 * NUM_FRAMES
MARKERS = ("<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>")
BEGIN, ENGLISH, GERMAN, TRANSCRIBE, _, END = IDS = range(VOCABULARY, VOCABULARY + len(MARKERS))


def test_pieces_are_cut_at_quiet_moments_and_cover_the_sound() -> None:
    samples = np.random.default_rng(0).uniform(-1, 1, 10 * 12800).astype(np.float32)
    samples[11200:12800] *= 0.01
    found = cuts(samples, 12800)
    assert [end for _, end in found[:-1]] == [start for start, _ in found[1:]]
    assert (found[0][0], found[-1][1]) == (0, len(samples))
    for start, end in found[:-1]:
        assert 0 < end - start <= 12800
    assert abs(found[0][1] - 12000) <= 160, "the middle of the quiet part"
    assert cuts(samples[:12800], 12800) == [(0, 12800)] and cuts(samples[:0], 12800) == []


def write_wav(path: Path, num_samples: int, seed: int) -> Path:
    samples = np.random.default_rng(seed).integers(-9000, 9000, num_samples).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(samples.tobytes())
    return path


def write_model(folder: Path) -> Path:
    write_seq2seq(folder, "whisper", vocab_size=VOCABULARY + len(MARKERS))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    shape = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [shape | {"id": own, "content": name} for own, name in zip(IDS, MARKERS, strict=True)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN}, "suppress_tokens": [*IDS, *range(700)]}
    settings |= {"eos_token_id": 2, "decoder_start_token_id": BEGIN}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.ci
def test_files_are_transcribed_in_pieces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "model")
    files = [write_wav(tmp_path / "a.wav", 2 * LONGEST + 99, 1), write_wav(tmp_path / "b.wav", 500, 2)]
    arguments = ["transcribe", *map(str, files), "--model", str(model), *flags(SLOTS)]
    assert cli.main([*arguments, "--language", "de", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["file"] for line in lines] == [str(files[0])] * 3 + [str(files[1])]
    assert [line["end"] for line in lines[:2]] == [line["start"] for line in lines[1:3]]
    assert lines[2]["end"] == (2 * LONGEST + 99) / 16000 and lines[3]["end"] == 500 / 16000
    with LLM(str(model), **SLOTS) as llm:
        samples, rate = read_wav(files[1].read_bytes())
        prompt: dict[str, Any] = {"encoder_prompt": {"multi_modal_data": {"audio": (samples, rate)}}}
        prompt["decoder_prompt"] = {"prompt_token_ids": [BEGIN, GERMAN, TRANSCRIBE, END]}
        biased = SamplingParams(
            temperature=0.0, min_tokens=1, max_tokens=None, logit_bias=dict.fromkeys([*IDS, *range(294)], -100.0)
        )
        (due,) = llm.generate([prompt], biased, use_tqdm=False)
        assert due.outputs[0].text.strip() == lines[3]["text"]
        one = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=[ENGLISH, GERMAN])
        prompt["decoder_prompt"] = {"prompt_token_ids": [BEGIN]}
        (found,) = llm.generate([prompt], one, use_tqdm=False)
        prompt["decoder_prompt"] = {"prompt_token_ids": [BEGIN, found.outputs[0].token_ids[0], TRANSCRIBE, END]}
        (due,) = llm.generate([prompt], biased, use_tqdm=False)
    assert cli.main(["transcribe", str(files[1]), *arguments[3:]]) == 0
    assert capsys.readouterr().out.strip() == due.outputs[0].text.strip()
    assert cli.main([*arguments, "--language", "fr"]) == 1
    assert "--language fr is not one of the model's: de, en" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["{wav}"], 2, "no model"),
        (["{text}", "--model", "x"], 1, "no WAV file"),
        (["{missing}", "--model", "x"], 1, "No such file"),
    ],
)
def test_errors_name_the_reason(
    arguments: list[str], code: int, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"wav": write_wav(tmp_path / "a.wav", 9, 1), "text": tmp_path / "b.wav", "missing": tmp_path / "c.wav"}
    places["text"].write_text("words")
    assert cli.main(["transcribe", *(each.format(**places) for each in arguments)]) == code
    assert why in capsys.readouterr().err
