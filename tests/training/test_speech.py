"""The recogniser: its phrases, windows and rows of tokens, and transcriptions by the trained model."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

from jaxllm import LLM, SamplingParams
from jaxllm.commands import cli
from jaxllm.embedded import SPEECH_DIR
from jaxllm.media.sound import HOP, RATE, LogMel
from jaxllm.media.sound_files import read_sound
from jaxllm.text.tokenizer import load_tokenizer
from tests.support.sizes import FEW_SLOTS
from training import dictation, evaluate_speech, phrases, spoken
from training.dictation import Ids, row_of, written
from training.evaluate_speech import transcribe
from training.export import round_to_bfloat16, write_recogniser
from training.phrases import Phrase, draw_phrase, word_errors
from training.recogniser import Recogniser, Shape, greedy
from training.spoken import Recorded, Speaker, Voice, Word, windows_of

EXAMPLE = SPEECH_DIR / "example.wav"
PHRASES = "set the alarm for two thirty on thursday", "switch off the fan in the bedroom"


class Tones:
    """Speaks words as tones of 0.2 s, instead of espeak-ng."""

    def say(self, phrase: Phrase, voice: Voice) -> tuple[np.ndarray, list[Word]]:
        times = np.arange(RATE // 5) / RATE
        tones = [np.sin(2 * np.pi * times * (300 + 20 * phrases.WORDS.index(word))) for word in phrase.words]
        words = [Word(word, number / 5, (number + 1) / 5) for number, word in enumerate(phrase.words)]
        return np.concatenate(tones).astype(np.float32), words


def test_numbers_are_written_as_they_are_spoken() -> None:
    found = [phrases.number(value) for value in (0, 13, 40, 99, 105, 2000, 9919)]
    due = "zero", "thirteen", "forty", "ninety nine", "one hundred five", "two thousand"
    assert found == [*due, "nine thousand nine hundred nineteen"]
    assert len({phrases.number(value) for value in range(10000)}) == 10000


def test_phrases_follow_from_seeds_and_none_of_the_evaluation_is_trained() -> None:
    for kind in phrases.KINDS:
        drawn = [[draw_phrase(random.Random(3), is_held, kind) for _ in range(2)] for is_held in (False, True)]
        assert all(one == other and one.kind == kind for one, other in drawn)
    rng = random.Random(0)
    trained, held = ({draw_phrase(rng, is_held).text for _ in range(3000)} for is_held in (False, True))
    assert not trained & held
    assert {word for text in trained for word in text.split()} == set(phrases.WORDS)
    assert not set(spoken.SPEAKERS) & set(spoken.HELD_OUT_SPEAKERS)
    low, high = spoken.HELD_OUT_SPEEDS
    speeds = {spoken.draw_voice(rng).speed for _ in range(500)}
    assert min(speeds) < low and max(speeds) >= high and not speeds & set(range(low, high))
    assert {spoken.draw_voice(rng, is_paced=True).speed for _ in range(500)} == set(range(low, high))


def test_windows_follow_from_their_seed() -> None:
    """All kinds of windows: short ones, parts of longer recordings, and such without speech."""
    espeak: Any = Tones()
    first, again, other = (list(itertools.islice(Speaker(espeak).windows(seed), 60)) for seed in (0, 0, 1))
    for one, two in zip(first, again, strict=True):
        assert one.words == two.words and one.bands.tobytes() == two.bands.tobytes()
    assert [each.words for each in first] != [each.words for each in other]
    assert any(not each.words for each in first) and any(each.is_cut for each in first)
    for window in first:
        assert window.bands.shape == (spoken.NUM_MELS, spoken.NUM_FRAMES)
        bounds = [time for word in window.words for time in (word.start, word.end)]
        assert bounds == sorted(bounds) and all(0 <= time <= spoken.WINDOW_SECONDS for time in bounds)


def test_windows_have_the_sound_of_their_words() -> None:
    espeak: Any = Tones()
    made = Speaker(espeak).recording(random.Random(5), Voice("", "", 0, 0), lambda rng: draw_phrase(rng, True), 4)
    mel = LogMel(spoken.NUM_MELS, spoken.NUM_FRAMES)
    seen, bands = list[str](), mel.recording(made.samples).bands
    for window in windows_of(mel, made, random.Random(0)):
        rest = [word.text for word in window.words]
        kept = [each.text for each in written(window, True) if isinstance(each, Word)]
        assert rest[: len(kept)] == kept
        seen += kept
        for word in window.words:
            column = window.bands[:, round((word.start + word.end) / 2 * RATE / HOP)].astype(np.float32)
            tone = Tones().say(Phrase("", (word.text,)), Voice("", "", 0, 0))[0]
            assert np.argmax(column) == np.argmax(mel.recording(tone).bands[:, 10])
    assert seen == [word.text for word in made.words]
    assert bands.shape[1] > 2 * spoken.NUM_FRAMES


def words_at(*times: tuple[str, float, float, int]) -> list[Word]:
    return [Word(*each) for each in times]


ONE = words_at(("one", 0.5, 0.8, 0), ("two", 0.8, 1.104, 0))
TWO = words_at(("up", 2.0, 2.2, 1))


@pytest.mark.parametrize(
    ("words", "cut", "is_cut", "due"),
    [
        (ONE, None, False, "<|0.50|> one two<|1.10|>"),
        ([*ONE, *TWO], None, False, "<|0.50|> one two<|1.10|><|2.00|> up<|2.20|>"),
        ([*ONE, *TWO], Word("go", 3.9, 4.2, 1), True, "<|0.50|> one two<|1.10|><|2.00|>"),
        ([*ONE, *TWO], Word("go", 3.9, 4.2, 2), False, "<|0.50|> one two<|1.10|><|2.00|> up<|2.20|><|3.90|>"),
        ([*ONE, *TWO], Word("go", 4.1, 4.2, 2), False, "<|0.50|> one two<|1.10|><|2.00|> up<|2.20|>"),
        (ONE, Word("go", 3.9, 4.2, 0), True, "<|0.50|> one two<|1.10|><|3.90|>"),
        (ONE, Word("go", 4.1, 4.2, 0), True, "<|0.50|> one two<|1.10|><|4.00|>"),
        ([], None, False, "<|0.00|>"),
    ],
)
def test_rows_are_what_the_engine_reads_and_writes(words: list[Word], cut: Word | None, is_cut: bool, due: str) -> None:
    """Test outputs and spans of attention, with times and without."""
    tokenizer, engine = Tokenizer.from_file(str(SPEECH_DIR / "tokenizer.json")), load_tokenizer(SPEECH_DIR)
    assert tokenizer.to_str() == dictation.train_tokenizer().to_str()
    ids, bands = Ids(tokenizer), np.zeros((spoken.NUM_MELS, spoken.NUM_FRAMES), np.float16)
    window = spoken.Window(bands, words, cut, is_cut)
    for timed in (True, False):
        text = due if timed else "".join(f" {word.text}" for word in words)
        prompt = "".join(dictation.MARKERS[1:4]) + ("" if timed else dictation.NO_TIMES)
        row = row_of(ids, window, timed, 24)
        tokens = engine.encode(f"{prompt}{text}<|endoftext|>", add_special_tokens=False)
        assert row.inputs[: len(tokens)].tolist() == tokens
        targets = tokens[1:] if words or cut else [ids.no_speech, *tokens[2:]]
        assert row.targets[: len(targets)].tolist() == targets
        assert (row.targets[len(targets) :] == -1).all()
        assert not row.spans[len(targets) - 1 :].any()
        for token, (first, last) in zip(targets, row.spans, strict=False):
            named = next((word for word in words if token == ids.words[word.text]), None)
            if named is not None:
                assert first * 0.02 <= named.start + 1e-6 and named.end - 1e-6 <= last * 0.02
            elif token >= ids.first_time:
                assert first <= token - ids.first_time <= last
    with pytest.raises(ValueError, match="more than"):
        row_of(ids, window, True, 3)


def test_positions_are_labelled_with_their_words() -> None:
    words, indices = dictation.labels_of(ONE)
    due = np.zeros(spoken.POSITIONS, int)
    due[25:40], due[40:55] = 1 + phrases.WORDS.index("one"), 1 + phrases.WORDS.index("two")
    np.testing.assert_array_equal(words, due)
    assert indices[40:55].all() and not indices[:40].any()


def test_word_errors() -> None:
    assert [word_errors("a b c", found) for found in ("a b c", "a c", "b c d", "", "x a b c y")] == [0, 1, 2, 3, 2]


@pytest.mark.ci
def test_the_network_is_the_engines(tmp_path: Path) -> None:
    """Test random weights: the engine's tokens are those of the network that is trained."""
    tokenizer = dictation.train_tokenizer()
    shape = Shape(tokenizer.get_vocab_size(), width=32, heads=2, encoder_layers=1, decoder_layers=1, inner=64)
    ids, model = Ids(tokenizer), Recogniser(shape, nnx.Rngs(4))
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if leaf.ndim == 2 and "embed_tokens" not in path:  # else the outputs repeat one token
            leaf[...] = 3 * leaf[...]
    round_to_bfloat16(model)
    write_recogniser(model, tokenizer, tmp_path)
    rng = np.random.default_rng(0)
    sounds = [(0.1 * rng.standard_normal(count)).astype(np.float32) for count in (9000, 64000)]
    mel = LogMel(spoken.NUM_MELS, spoken.NUM_FRAMES)
    bands = jnp.asarray(np.stack([mel.spectrogram(each) for each in sounds]))
    due = greedy(model, bands, ids.prompt(False), ids.end)
    with LLM(str(tmp_path), **FEW_SLOTS) as llm:
        prompts = [
            {
                "encoder_prompt": {"multi_modal_data": {"audio": each}},
                "decoder_prompt": {"prompt_token_ids": ids.prompt(False)},
            }
            for each in sounds
        ]
        made = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=None), use_tqdm=False)
        found = [[*output.outputs[0].token_ids] for output in made]
    assert [[token for token in row if token != ids.end] for row in found] == due
    assert len({*map(tuple, due)}) == 2


@pytest.mark.ci
def test_the_example_is_transcribed(capsys: pytest.CaptureFixture[str]) -> None:
    """Test the command without a model: held-out phrases, and a recording of two windows."""
    files = sorted((Path(__file__).parent / "spoken").glob("*.wav"))
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in FEW_SLOTS.items()]
    assert cli.main(["transcribe", *map(str, files), str(EXAMPLE), *sizes]) == 0
    due = [file.with_suffix(".txt").read_text() for file in files]
    assert len(due) == 3
    assert capsys.readouterr().out == "".join(due) + f"{' '.join(PHRASES)}\n"


def test_segments_and_words_have_their_times() -> None:
    sound = read_sound(EXAMPLE.read_bytes())
    with LLM("jaxllm-speech", **FEW_SLOTS) as llm:
        silence, noise = np.zeros(16000, np.float32), np.random.default_rng(0).normal(0, 0.001, 24000)
        made, *blank = transcribe(llm, [sound, silence, noise.astype(np.float32)], timestamps=True, words=True)
    texts = [each.text.strip() for each in made.segments]
    assert texts == [*PHRASES] and made.language == "en"
    assert [each.text for each in made.words] == " ".join(PHRASES).split()
    for segment, own in zip(made.segments, (made.words[:8], made.words[8:]), strict=True):
        assert segment.start - 0.25 <= own[0].start < own[-1].start < segment.end
    first, last = (int(time * RATE) for time in (made.segments[0].start, made.segments[-1].end))
    outside = np.concatenate([sound[:first], sound[last:]])
    assert len(outside) > RATE // 2 and sound[first:last].std() > 2 * outside.std()
    starts = [word.start for word in made.words]
    assert starts == sorted(starts)
    assert [each.text for each in blank] == ["", ""]


def test_rates_are_of_words() -> None:
    own = [spoken.Spoken("", Recorded(np.zeros(1), ONE))] * 2
    assert evaluate_speech.rate(own, ["one two", "one too"]) == {"rate": 0.75, "right": 3, "asked": 4}
