"""Evaluates the recogniser on held-out phrases through the engine: `python -m training.evaluate_speech`.

Needs espeak-ng. A rate is one minus the word error rate. The rates are written to the model's score.json.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxllm import LLM
from jaxllm.embedded import SPEECH_DIR
from jaxllm.engine.features.speech import offline
from jaxllm.engine.features.speech.rules import rules_of
from jaxllm.engine.features.speech.transcription import Asked, Transcription
from training import questions
from training.phrases import KINDS, word_errors
from training.questions import Score
from training.spoken import HELD_OUT_ACCENT, SPEAKERS, Spoken, held_out

PHRASES = 600
NEAR = 0.1
MAIN = "held out"
# Guaranteed rates.
PROMISED: dict[str, float] = {MAIN: 0.95}


class Part(NamedTuple):
    """Recordings of the evaluation: arguments of `held_out`, and their number as a share of all."""

    options: dict[str, Any]
    share: float = 1 / 3


PARTS: dict[str, Part] = {
    MAIN: Part({}, 1.0),
    "without noise": Part({"noise": 0.0}),
    "speakers of the training": Part({"speakers": SPEAKERS}),
    "another accent": Part({"accents": (HELD_OUT_ACCENT,)}),
    "four phrases": Part({"phrases": 4}, 1 / 10),
}


def transcribe(llm: LLM, sounds: Sequence[np.ndarray], **asked: Any) -> list[Transcription]:
    """Transcribe sounds, as `jaxllm transcribe` does."""
    model = llm.engine.model
    rules = rules_of(model)
    assert rules is not None and model.sources is not None and model.sources.sound is not None
    recordings = [model.sources.sound.recording(samples) for samples in sounds]
    made = [Transcription(model, rules, recording, Asked(**asked)) for recording in recordings]
    if failures := offline.run(llm.engine, made):
        raise next(iter(failures.values()))
    return made


def rate(spoken: Sequence[Spoken], texts: Sequence[str]) -> dict[str, float | int]:
    """Return the score of transcriptions, in words."""
    errors = sum(word_errors(each.text, text) for each, text in zip(spoken, texts, strict=True))
    words = sum(len(each.text.split()) for each in spoken)
    return {"rate": round(1 - errors / words, 4), "right": words - errors, "asked": words}


def times(spoken: Sequence[Spoken], timed: Sequence[Transcription]) -> Score:
    """Return how many ends of segments and beginnings of words are less than `NEAR` seconds from those spoken.

    Only texts that are right count.
    """
    found: dict[str, list[tuple[float, float]]] = {"ends of segments": [], "beginnings of words": []}
    for each, made in zip(spoken, timed, strict=True):
        if made.text != each.text or len(made.segments) > 1:
            continue
        due, segment = each.recorded.words, made.segments[0]
        found["ends of segments"].append((segment.end, due[-1].end))
        found["beginnings of words"] += [(own.start, word.start) for own, word in zip(made.words, due, strict=True)]
    scores: Score = {}
    for name, pairs in found.items():
        right = sum(abs(own - due) < NEAR for own, due in pairs)
        scores[name] = {"rate": round(right / max(1, len(pairs)), 4), "right": right, "asked": len(pairs)}
    return scores


def evaluate(llm: LLM, seed: int, phrases: int, shows: bool = False) -> Score:
    """Return the rates of right words by part, and of right phrases."""
    scores: Score = {}
    for name, part in PARTS.items():
        spoken = list(held_out(seed, max(1, round(part.share * phrases)), **part.options))
        texts = [each.text for each in transcribe(llm, [each.recorded.samples for each in spoken])]
        scores[name] = rate(spoken, texts)
        if name != MAIN:
            continue
        timed = transcribe(llm, [each.recorded.samples for each in spoken], timestamps=True, words=True)
        scores["with timestamps"] = rate(spoken, [each.text for each in timed])
        scores |= times(spoken, timed)
        for kind in KINDS:
            own = [number for number, each in enumerate(spoken) if each.kind == kind]
            if own:
                scores[kind] = rate([spoken[number] for number in own], [texts[number] for number in own])
        right = [each.text == text for each, text in zip(spoken, texts, strict=True)]
        scores["whole phrases"] = {"rate": round(sum(right) / len(right), 4), "right": sum(right), "asked": len(right)}
        wrong = [(each.text, text) for each, text in zip(spoken, texts, strict=True) if each.text != text]
        for due, found in wrong if shows else ():
            print(f"{due}\n  {found}")
    return scores


def main() -> None:
    """Evaluate, print and write the score; exit with 1 if a rate is below its guarantee."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate_speech", description="Write phrases down.")
    parser.add_argument("--model", type=Path, default=SPEECH_DIR, help="folder of the model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the phrases and voices")
    parser.add_argument("--limit", type=int, help=f"speak this many phrases, not {PHRASES}, and write no score")
    parser.add_argument("--show", action="store_true", help="print the phrases that are written wrong")
    options = parser.parse_args()
    with LLM(str(options.model)) as llm:
        scores = evaluate(llm, options.seed, options.limit or PHRASES, options.show)
    questions.report(scores, options, options.model, PROMISED, phrases=PHRASES)


if __name__ == "__main__":
    main()
