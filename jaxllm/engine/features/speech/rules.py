"""The tokens that a speech model may write next, as transformers' generation for Whisper restricts them. Pure.

V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from jaxllm.engine.model_info import ModelInfo
from jaxllm.errors import UserError
from jaxllm.runner.timestamps import first_timestamp

TASKS = ("transcribe", "translate")


@dataclass(slots=True, eq=False)
class Alignment:
    """Receives the attention of an output to its sound."""

    weights: np.ndarray | None = None  # float32[A, T - 1, L], of each token but the last, once the output is complete


@dataclass(frozen=True)
class SpeechParams:
    """Applies the rules to a request's output."""

    timestamps: bool = False  # the output has a pair of timestamps around each segment
    alignment: Alignment | None = None


@dataclass(frozen=True, kw_only=True)
class SpeechRules:
    """The tokens with a meaning in a model's prompts and outputs."""

    vocab_size: int
    start: int
    end: int
    no_timestamps: int | None
    first_timestamp: int | None  # 0.00 s; the tokens after it are steps of 0.02 s
    most_initial: int | None  # steps of the first timestamp of an output
    languages: Mapping[str, int]  # by code, as "en"; empty: the model has one language
    tasks: Mapping[str, int]
    previous: int | None  # begins a text that precedes the sound's
    no_speech: int | None
    suppressed: Sequence[int]
    begin_suppressed: Sequence[int]  # as the first token of an output

    def allowed(self, written: Sequence[int], timed: bool) -> np.ndarray:
        """Return the tokens that may follow an output, int32[W] with a bit for each."""
        words = (self._allowed if written else self._allowed_first).copy()
        if not timed:
            return words
        first, size = self.first_timestamp, self.vocab_size
        assert first is not None
        ends_in_time = bool(written) and written[-1] >= first
        if ends_in_time:
            is_pair = len(written) < 2 or written[-2] >= first
            words &= ~(_between(first, size, size) if is_pair else _between(0, self.end, size))
            least = written[-1] + is_pair
        else:  # timestamps increase, so the last one is the largest
            least = max((token + 1 for token in written if token >= first), default=first)
        words &= ~_between(first, least, size)
        if not written:
            words &= ~_between(0, first, size)
            if self.most_initial is not None:
                words &= ~_between(first + self.most_initial + 1, size, size)
        return words

    @cached_property
    def _allowed(self) -> np.ndarray:
        bits = np.zeros(-(-self.vocab_size // 32) * 32, np.uint8)
        bits[: self.vocab_size] = 1
        bits[list(self.suppressed)] = 0
        if self.no_timestamps is not None:  # belongs to prompts
            bits[self.no_timestamps] = 0
        return _packed(bits)

    @cached_property
    def _allowed_first(self) -> np.ndarray:
        bits = np.ones(-(-self.vocab_size // 32) * 32, np.uint8)
        bits[list(self.begin_suppressed)] = 0
        return self._allowed & _packed(bits)

    def language_of(self, name: str) -> int:
        """Return a language's token; raise UserError if the model does not have the language."""
        found = self.languages.get(name.lower())
        if found is None:
            known = ", ".join(sorted(self.languages)) or "none to choose, because the model has one"
            raise UserError(f"language {name[:32]!r} is not one of the model's: {known}.", "language")
        return found

    def prompt(self, language: int | None, task: str, timestamps: bool, before: Sequence[int] = ()) -> list[int]:
        """Return a decoder prompt; `language` is a token, None for a model with one, `before` a text's tokens."""
        ids = [self.start]
        if self.languages:
            if language is None or task not in self.tasks:
                raise UserError(f"The model has no task {task!r:.32}; it has {', '.join(self.tasks)}.", "task")
            ids += [language, self.tasks[task]]
        elif task != "transcribe":
            raise UserError("The model has one language and translates nothing; transcribe instead.", "task")
        if timestamps and self.first_timestamp is None:
            raise UserError("The model writes no timestamps, which longer sound and segments need.", "timestamps")
        if not timestamps and self.no_timestamps is not None:
            ids.append(self.no_timestamps)
        return [self.previous, *before, *ids] if before and self.previous is not None else ids

    def words(self, written: Sequence[int]) -> list[int]:
        """Return an output's tokens of text."""
        first = self.vocab_size if self.first_timestamp is None else self.first_timestamp
        return [token for token in written if token < first]


def rules_of(model: ModelInfo) -> SpeechRules | None:
    """Return the rules of a model whose encoder reads sound."""
    if model.sources is None or model.sources.sound is None:
        return None
    settings, token_of, size = model.generation_config, model.tokenizer.token_id, model.vocab_size
    first = first_timestamp(settings, size)
    ends = settings.get("eos_token_id")
    end = next((each for each in (ends if isinstance(ends, list) else [ends]) if each in model.eos_ids), None)
    most = settings.get("max_initial_timestamp_index")
    return SpeechRules(
        vocab_size=size,
        start=model.sources.start[0] if model.sources.start else token_of("<|startoftranscript|>") or 0,
        end=end if end is not None else min(model.eos_ids, default=0),
        no_timestamps=first - 1 if first is not None else token_of("<|notimestamps|>"),
        first_timestamp=first,
        most_initial=most if type(most) is int and most >= 0 else None,
        languages={name[2:-2].lower(): token for name, token in _tokens(settings, "lang_to_id", size).items()},
        tasks={
            **{name: token for name in TASKS if (token := token_of(f"<|{name}|>")) is not None},
            **_tokens(settings, "task_to_id", size),
        },
        previous=_first_of(settings.get("prev_sot_token_id"), token_of("<|startofprev|>")),
        no_speech=_first_of(token_of("<|nospeech|>"), token_of("<|nocaptions|>")),
        suppressed=_ids(settings.get("suppress_tokens"), size),
        begin_suppressed=_ids(settings.get("begin_suppress_tokens"), size),
    )


def _first_of(*given: Any) -> int | None:
    return next((each for each in given if type(each) is int), None)


def _ids(given: Any, vocab_size: int) -> list[int]:
    return [token for token in given or () if type(token) is int and 0 <= token < vocab_size]


def _tokens(settings: Mapping[str, Any], name: str, vocab_size: int) -> dict[str, int]:
    found = settings.get(name)
    items = found.items() if isinstance(found, Mapping) else ()
    return {key: token for key, token in items if isinstance(key, str) and _ids([token], vocab_size)}


@lru_cache(maxsize=4096)
def _between(start: int, end: int, vocab_size: int) -> np.ndarray:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[start:end] = 1
    words = _packed(bits)
    words.flags.writeable = False
    return words


def _packed(bits: np.ndarray) -> np.ndarray:
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
