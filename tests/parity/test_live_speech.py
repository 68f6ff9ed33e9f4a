"""Whisper's decoding rules and long recordings equal transformers' `generate`. Needs torch: `make parity`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM
from jaxllm.embedded import SPEECH_DIR
from jaxllm.engine.features.speech import offline
from jaxllm.engine.features.speech.rules import rules_of
from jaxllm.engine.features.speech.transcription import Asked, Transcription, text_before
from jaxllm.media.sound_files import read_sound
from tests.support.paths import ROOT
from tests.support.seq2seq_models import FIRST_TIME, NUM_FRAMES, SUPPRESSED, WINDOW, write_whisper
from tests.support.sizes import SLOTS

pytestmark = pytest.mark.parity
TASKS = [("en", "translate", False), ("de", "transcribe", True), (None, "transcribe", False)]


class Peer:
    """Whisper in transformers."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

        self.torch = torch
        torch.set_num_threads(1)  # its threads wait for each other on a machine with other work
        self.model: Any = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.extractor: Any = WhisperFeatureExtractor(feature_size=self.model.config.num_mel_bins)

    def segments(self, samples: np.ndarray, asked: Asked) -> tuple[list[tuple[list[int], float, float]], list[float]]:
        """Return tokens and times of segments, and times of tokens."""
        bands = self.extractor._np_extract_fbank_features(samples[None], "cpu")
        before: dict[str, Any] = {}
        if asked.before:
            before["prompt_ids"] = self.torch.tensor([self.model.generation_config.prev_sot_token_id, *asked.before])
        found = self.model.generate(
            self.torch.tensor(bands),
            language=asked.language,
            task=asked.task,
            return_timestamps=asked.timestamps,
            return_segments=True,
            return_token_timestamps=asked.words,
            do_sample=False,
            **before,
        )
        (segments,) = found["segments"]
        made = [(each["tokens"].tolist(), float(each["start"]), float(each["end"])) for each in segments]
        times = (each["token_timestamps"].tolist() for each in segments) if asked.words else ()
        return made, [time for each in times for time in each]


@pytest.mark.parametrize(
    ("times", "timed"), [(1.0, True), pytest.param(1.35, True, marks=pytest.mark.slow), (1.0, False)]
)
def test_segments_equal_transformers(times: float, timed: bool, tmp_path: Path) -> None:
    """Test sound of one window and of several, languages, tasks and a text before."""
    banned = [*SUPPRESSED, *range(FIRST_TIME, FIRST_TIME + NUM_FRAMES // 2 + 1)]
    changes = {} if timed else {"suppress_tokens": banned}  # a trained model writes none after <|notimestamps|>
    peer = Peer(write_whisper(tmp_path, times=times, **changes))
    rng = np.random.default_rng(3)
    with LLM(str(tmp_path), **SLOTS) as llm:
        model = llm.engine.model
        rules = rules_of(model)
        assert rules is not None and model.sources is not None and model.sources.sound is not None
        jobs = []
        for language, task, has_text in TASKS:
            before = text_before(model, "A cat sat.") if has_text else ()
            asked = Asked(language=language, task=task, timestamps=timed, words=timed, before=before)
            count = WINDOW + 8999 if timed and language is None else WINDOW
            samples = (0.2 * rng.standard_normal(count)).astype(np.float32)
            recording = model.sources.sound.recording(samples)
            jobs.append((samples, asked, Transcription(model, rules, recording, asked)))
        assert not offline.run(llm.engine, [job for _, _, job in jobs])
        assert llm.engine.metrics.compilations_after_ready == 0
    times_found: list[tuple[float, float]] = []
    for samples, asked, job in jobs:
        due, times_of_tokens = peer.segments(samples, asked)
        assert [list(each.ids) for each in job.segments] == [ids for ids, _, _ in due], asked
        found = [(each.start, each.end) for each in job.segments]
        np.testing.assert_allclose(found, [(start, end) for _, start, end in due], atol=1e-6)
        assert len(job.times) == len(times_of_tokens)
        seeks = [each.seek for each in job.segments for _ in each.ids]
        for seek, own, other in zip(seeks, job.times, times_of_tokens, strict=False):
            if seek + NUM_FRAMES <= job.num_frames:  # transformers aligns the padding of other windows too
                times_found.append((own - seek / 100, other - seek / 100))
    if timed:
        np.testing.assert_allclose(*zip(*times_found, strict=True), atol=1e-6)
        assert len({round(own, 2) for own, _ in times_found}) > 1
    assert not timed or max(len(job.segments) for _, _, job in jobs) > 3


def test_the_recogniser_equals_transformers() -> None:
    """Test the included model on spoken phrases and on its example of two windows: tokens and times."""
    from transformers import WhisperProcessor

    peer, processor = Peer(SPEECH_DIR), WhisperProcessor.from_pretrained(SPEECH_DIR)
    files = [*sorted((ROOT / "tests/training/spoken").glob("*.wav")), SPEECH_DIR / "example.wav"]
    with LLM(str(SPEECH_DIR), **SLOTS) as llm:
        model = llm.engine.model
        rules = rules_of(model)
        assert rules is not None and model.sources is not None and model.sources.sound is not None
        sound = model.sources.sound
        jobs = []
        for file in files:
            samples = read_sound(file.read_bytes())
            for timed in (True,) if len(samples) > sound.num_samples else (True, False):
                asked = Asked(language="en", timestamps=timed)
                jobs.append((samples, asked, Transcription(model, rules, sound.recording(samples), asked)))
        assert not offline.run(llm.engine, [job for _, _, job in jobs])
    for samples, asked, job in jobs:
        padded = np.pad(samples, (0, max(0, sound.num_samples - len(samples))))
        due, _ = peer.segments(padded, asked)
        assert [list(each.ids) for each in job.segments] == [ids for ids, _, _ in due], asked
        texts = processor.batch_decode([ids for ids, _, _ in due], skip_special_tokens=True)
        assert job.text == "".join(texts).strip()
        if asked.timestamps:
            found = [(each.start, each.end) for each in job.segments]
            np.testing.assert_allclose(found, [(start, end) for _, start, end in due], atol=1e-6)
        features = processor(padded, sampling_rate=16000, return_tensors="np", truncation=False).input_features[0]
        np.testing.assert_allclose(sound.recording(samples).bands, features, atol=1e-5)
    assert len(files) == 4 and max(len(job.segments) for _, _, job in jobs) == 2
