"""Write down a recording of any length, window by window, as transformers' long-form generation for Whisper.

A window begins where the last complete segment of the one before ended. Without timestamps in the model, windows are
cut at quiet moments. Independent of the engine: `requests` yields requests and takes the outputs.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from jaxllm.engine.features.speech.rules import Alignment, SpeechParams, SpeechRules
from jaxllm.engine.features.speech.words import Word, token_times, words_of
from jaxllm.engine.model_info import ModelInfo
from jaxllm.errors import RequestFailedError, UserError
from jaxllm.media.sound import HOP, RATE, Recording
from jaxllm.outputs import CompletionOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

FRAME_SECONDS = HOP / RATE
_STEP_FRAMES = 2  # of a timestamp's step, which is a position of the encoder
_SEARCHED, _QUIET = 1 / 6, 10  # of a window, at its end, for the quietest moment; frames of a quiet moment


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How to write a recording down."""

    task: str = "transcribe"  # or "translate", into English
    language: str | None = None  # a code, as "en"; None: the likeliest in the first window
    before: Sequence[int] = ()  # tokens of a text that precedes the recording
    timestamps: bool = False  # segments with times; recordings longer than a window have them in any case
    words: bool = False  # `Transcription.words`, with timestamps
    scores: bool = False  # `Segment.avg_logprob` and `no_speech_prob`
    temperature: float = 0.0
    seed: int | None = None


class Request(NamedTuple):
    """A request for the engine."""

    prompt: dict[str, Any]
    params: SamplingParams
    speech: SpeechParams | None  # None: a probe, without text


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a transcription, in seconds of the recording."""

    start: float
    end: float
    ids: Sequence[int]  # with timestamps, if the model writes them
    text: str
    seek: int  # first frame of its window
    temperature: float = 0.0
    avg_logprob: float | None = None  # of the window's tokens
    compression_ratio: float | None = None  # of the window's text by zlib; repetitive text has a large one
    no_speech_prob: float | None = None  # of the window


class Transcription:
    """The transcription of a recording."""

    def __init__(self, model: ModelInfo, rules: SpeechRules, recording: Recording, asked: Asked) -> None:
        """Raise UserError if the model lacks the task, the language or timestamps."""
        self._tokenizer, self._rules, self._recording = model.tokenizer, rules, recording
        is_long = recording.num_frames > recording.num_window
        self._timed = asked.timestamps or (is_long and rules.first_timestamp is not None)
        self._asked = asked
        self._language = None if asked.language is None or not rules.languages else rules.language_of(asked.language)
        if asked.language is not None and not rules.languages and asked.language.lower() != "en":
            rules.language_of(asked.language)
        rules.prompt(next(iter(rules.languages.values()), None), asked.task, self._timed)
        room = model.max_model_len // 2 - 1  # the most in training
        self._before = list(asked.before)[-room:]
        self.segments: list[Segment] = []
        self.words: list[Word] = []
        self.times: list[float] = []  # with words, the seconds of each token of the segments
        self.seek = 0  # frames that are written down
        self.num_prompt_tokens = self.num_output_tokens = 0

    @property
    def num_frames(self) -> int:
        return self._recording.num_frames

    @property
    def seconds(self) -> float:
        return self._recording.num_frames * FRAME_SECONDS

    @property
    def language(self) -> str | None:
        """The code of the language, once it is known; None of a model with one."""
        return next((code for code, token in self._rules.languages.items() if token == self._language), None)

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()

    def text_with(self, ids: Sequence[int]) -> str:
        """Return the text so far with that of a window's first tokens: of its complete segments, if it has times."""
        before = "".join(segment.text for segment in self.segments)
        if self._timed:
            ends = self._ends(ids)
            ids = ids[: ends[-1]] if ends else []
        return (before + self._text(ids)).rstrip("\ufffd").strip()

    def requests(self) -> Generator[Request, CompletionOutput]:
        """Yield requests, one after the other, and take their outputs; raise RequestFailedError if one failed."""
        asked, rules = self._asked, self._rules
        while self.seek < self._recording.num_frames:
            sound = {"multi_modal_data": {"audio": self._recording.window(self.seek)}}
            no_speech = None
            if (rules.languages and self._language is None) or asked.scores:
                no_speech = yield from self._probe(sound)
            ids = rules.prompt(self._language, asked.task, self._timed, self._before)
            params = SamplingParams(
                temperature=asked.temperature,
                seed=asked.seed,
                max_tokens=None,
                logprobs=0 if asked.scores else None,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"encoder_prompt": sound, "decoder_prompt": {"prompt_token_ids": ids}}
            alignment = Alignment() if asked.words else None
            output = _checked((yield Request(prompt, params, SpeechParams(self._timed, alignment))))
            self.num_prompt_tokens += len(ids)
            self.num_output_tokens += len(output.token_ids)
            frame = self.seek
            written = self._take_in(output, no_speech)
            if alignment is not None:
                self._add_words(alignment, written, frame)

    def _probe(self, sound: dict[str, Any]) -> Generator[Request, CompletionOutput, float | None]:
        """Return the probability of no speech; choose the language, unless it is given."""
        rules, asks = self._rules, self._asked.scores and self._rules.no_speech is not None
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            allowed_token_ids=list(rules.languages.values()) or None,
            logprob_token_ids=[rules.no_speech] if asks and rules.no_speech is not None else None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"encoder_prompt": sound, "decoder_prompt": {"prompt_token_ids": [rules.start]}}
        output = _checked((yield Request(prompt, params, None)))
        if self._language is None and rules.languages:
            self._language = output.token_ids[0]
        if rules.no_speech is None or not output.logprobs:
            return None
        return float(np.exp(output.logprobs[0][rules.no_speech].logprob))

    def _add_words(self, alignment: Alignment, written: Sequence[int], frame: int) -> None:
        """Append the words of a window, which begins at a frame; slow for long ones."""
        if alignment.weights is None:
            raise RequestFailedError("The times of words could not be computed.")
        num_frames = min(self._recording.num_window, self._recording.num_frames - frame)
        num_positions = max(1, num_frames // _STEP_FRAMES)
        times = token_times(alignment.weights[:, :, :num_positions])
        last = times[-1] if len(times) else 0.0
        starts = [*times.tolist(), last][: len(written)]  # the last token was read by no step
        starts += [last] * (len(written) - len(starts))
        first = self._rules.first_timestamp or self._rules.vocab_size
        starts = [frame * FRAME_SECONDS + time for time in starts]
        self.times += starts
        texts = [(token, time) for token, time in zip(written, starts, strict=True) if token < first]
        end = starts[-1] if starts else 0.0
        ids, begins = [token for token, _ in texts], [time for _, time in texts]
        self.words += words_of(self._tokenizer, ids, begins, self.language, end)

    def _take_in(self, output: CompletionOutput, no_speech: float | None) -> list[int]:
        """Append a window's segments, advance `seek`, and return the segments' tokens."""
        ids = list(output.token_ids)
        if ids and ids[-1] == self._rules.end:
            ids.pop()
        num_frames = min(self._recording.num_window, self._recording.num_frames - self.seek)
        if self._timed:
            found, offset = self._divided(ids, num_frames)
        else:
            offset = num_frames if self.seek + num_frames == self._recording.num_frames else self._quiet_moment()
            found = [(0, offset, ids)]
        score, ratio = None, None
        if self._asked.scores:
            score = (output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))
            written = self._text(ids).encode()
            ratio = len(written) / len(zlib.compress(written))
        for start, end, own in found:
            times = {"start": (self.seek + start) * FRAME_SECONDS, "end": (self.seek + end) * FRAME_SECONDS}
            text, temperature = self._text(own), self._asked.temperature
            segment = Segment(**times, ids=own, text=text, seek=self.seek, temperature=temperature)
            self.segments.append(replace(segment, avg_logprob=score, compression_ratio=ratio, no_speech_prob=no_speech))
        self.seek += offset
        return [token for _, _, own in found for token in own]

    def _ends(self, ids: Sequence[int]) -> list[int]:
        """Return the index after each timestamp that another follows: a segment's end and the next one's start."""
        first = self._rules.first_timestamp
        assert first is not None
        return [at + 1 for at in range(len(ids) - 1) if ids[at] >= first and ids[at + 1] >= first]

    def _divided(self, ids: list[int], num_frames: int) -> tuple[list[tuple[int, int, list[int]]], int]:
        """Return the segments of a window (first and last frame, tokens), and the frames after which the next begins.

        Tokens after the last complete segment are dropped, because the window may have ended in a word.
        """
        first, ends = self._rules.first_timestamp, self._ends(ids)
        assert first is not None
        is_time = [token >= first for token in ids]
        if not ends:
            times = [token for token in ids if token > first]
            end = _STEP_FRAMES * (times[-1] - first) if times else num_frames // _STEP_FRAMES * _STEP_FRAMES
            return [(0, end, ids)], num_frames
        is_last = is_time[-2:] == [False, True]  # no speech follows
        if is_last:
            ends.append(len(ids))
        else:
            ends[-1] += 1
        found = []
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            last = ids[end - 2] if number == len(ends) - 1 and not is_last else ids[end - 1]
            found.append((_STEP_FRAMES * (ids[start] - first), _STEP_FRAMES * (last - first), ids[start:end]))
        offset = num_frames if is_last else found[-1][1]
        return found, offset or num_frames

    def _quiet_moment(self) -> int:
        """Return the frames of a window up to the quietest moment of its last sixth."""
        window = self._recording.num_window
        first = window - int(window * _SEARCHED)
        loudness = self._recording.bands[:, self.seek + first : self.seek + window].mean(axis=0)
        width = min(_QUIET, len(loudness))
        means = np.convolve(loudness, np.ones(width), "valid")
        return first + int(np.argmin(means)) + width // 2

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(self._rules.words(ids))


def text_before(model: ModelInfo, text: str) -> list[int]:
    """Return the tokens of a text that precedes a recording; raise UserError if it is far too long."""
    text = text.strip()
    if len(text) > 16 * model.max_model_len:
        raise UserError(f"prompt may have at most {16 * model.max_model_len} characters.", "prompt")
    return model.tokenizer.encode(f" {text}", add_special_tokens=False) if text else []


def _checked(output: CompletionOutput) -> CompletionOutput:
    if output.finish_reason == "error":
        raise RequestFailedError(f"The request failed: {output.stop_reason}.")
    return output
