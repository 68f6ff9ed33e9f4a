"""`SequenceGroup` and `Sequence`: a request in the engine, and one of its outputs."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from jaxllm.engine.language import Language
from jaxllm.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from jaxllm.runner.results import StepOutput
from jaxllm.sampling.sampler import Variant
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text import detokenizer
from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.repetition_detector import RepetitionDetector
from jaxllm.text.stop_strings import StopMatcher, match_stops
from jaxllm.text.tokenizer import Tokenizer

End = tuple[FinishReason, int | str | None]


@dataclass(slots=True, eq=False)
class Sequence:
    """One output of a request; features may subclass it."""

    not_finite: ClassVar[str] = "no token could be sampled: the logits were not finite, or all were forbidden"

    sequence_id: int
    group: SequenceGroup
    index: int
    params: SamplingParams
    eos_ids: frozenset[int]
    variant: Variant
    tokens: array[int]  # prompt and output, int32
    detokenizer: Detokenizer
    matcher: StopMatcher
    stop_tokens: Mapping[int, str] = field(default_factory=dict)  # those that are stop strings
    seed: int = 0
    row: np.ndarray | None = None
    extras: np.ndarray | None = None
    repetition: RepetitionDetector | None = None
    text: list[str] = field(default_factory=list)
    num_read: int = 0  # tokens in `text`
    num_shown: int = 0  # tokens; -1: the end too
    text_shown: int = 0
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) - len(self.group.prompt_token_ids)

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.eos_ids.union(self.params.stop_token_ids)

    def take_in(
        self, result: StepOutput, row: int, count: int, finish_reason: FinishReason | None
    ) -> tuple[int, End | None]:
        """Process a step's row with the newest `count` of `tokens`; return as `advance`."""
        start = len(self.tokens) - count
        length, end = self.advance(self.group.tokenizer, count, finish_reason)
        if self.logprobs is not None:  # all were sampled
            first = row if result.places is None else int(result.places[row])
            for place, token in enumerate(self.tokens[start:length]):
                self.add_logprobs(self.group.tokenizer, token, result, first + place)
        return length, end

    def advance(self, tokenizer: Tokenizer, count: int, finish_reason: FinishReason | None) -> tuple[int, End | None]:
        """Process the newest `count` of `tokens`; return the number to keep, and how they end the sequence."""
        for end in range(len(self.tokens) - count + 1, len(self.tokens)):
            ended = self._check(tokenizer, end, None)
            if ended is not None:
                return end, ended
        if finish_reason == "stop":
            token = self.tokens[-1]
            self.read(tokenizer, len(self.tokens) - 1)
            self.flush(tokenizer)
            return len(self.tokens), ("stop", None if token in self.eos_ids else token)
        return len(self.tokens), self._check(tokenizer, len(self.tokens), finish_reason)

    def _check(self, tokenizer: Tokenizer, end: int, finish_reason: FinishReason | None) -> End | None:
        stop_reason = None
        if finish_reason is None and self._repeats(end):
            finish_reason, stop_reason = "repetition", "repetition_detected"  # vLLM's term
        if finish_reason is None and not self.params.stop:
            return None  # text is made lazily
        self.read(tokenizer, end)
        if finish_reason is not None:
            self.flush(tokenizer)
        if self.matcher.matched is not None:
            return "stop", self.matcher.matched
        return None if finish_reason is None else (finish_reason, stop_reason)

    def _repeats(self, end: int) -> bool:
        if self.repetition is None or not self.repetition.push(self.tokens[end - 1]):
            return False
        return end - len(self.group.prompt_token_ids) >= self.params.min_tokens

    def read(self, tokenizer: Tokenizer, end: int | None = None) -> None:
        if not self.params.detokenize:
            return
        tokens = self.tokens[len(self.group.prompt_token_ids) + self.num_read : end]
        self.num_read += len(tokens)
        self.detokenizer, delta = detokenizer.advance(self.detokenizer, tokenizer, tokens)
        if self.num_read > self.params.min_tokens:
            self.matcher, delta = match_stops(self.matcher, delta)
        self._append(delta)
        if tokens and tokens[-1] in self.stop_tokens and self.num_read > self.params.min_tokens:
            self._stop_at(tokenizer, self.stop_tokens[tokens[-1]])

    def _stop_at(self, tokenizer: Tokenizer, stop: str) -> None:
        self.flush(tokenizer)
        if self.matcher.matched is None:
            self.matcher = replace(self.matcher, matched=stop)
            self._append("")

    def flush(self, tokenizer: Tokenizer) -> None:
        """Append text held back for a partial stop string or character."""
        if self.matcher.matched is not None or not self.params.detokenize:
            return
        delta = detokenizer.finish(self.detokenizer, tokenizer)
        if self.num_read > self.params.min_tokens:
            self.matcher, delta = match_stops(self.matcher, delta)
        if self.matcher.matched is None:
            delta += self.matcher.held
            self.matcher = replace(self.matcher, held="")
        self._append(delta)

    def add_logprobs(self, tokenizer: Tokenizer, token: int, result: StepOutput, row: int) -> None:
        if self.logprobs is None:
            return
        assert result.logprob is not None and result.rank is not None
        assert result.top_ids is not None and result.top_logprobs is not None
        value = float(result.logprob[row])
        chosen = logprob_of(tokenizer, token, value, int(result.rank[row]))
        top_ids, top_logprobs = result.top_ids[row], result.top_logprobs[row]
        whole = result.side.get("whole", {}).get(self.sequence_id)
        if whole is not None:
            top_ids, top_logprobs = whole.top_ids, whole.top_logprobs
        entry = entry_of(tokenizer, token, chosen, self.params.logprobs or 0, top_ids, top_logprobs)
        reported = self.params.logprob_token_ids or ()
        if reported:
            assert result.reported is not None
            for other, logprob in zip(reported, result.reported[row, : len(reported)].tolist(), strict=True):
                if other not in entry:
                    entry[other] = logprob_of(tokenizer, other, logprob, None)
        self.logprobs.append(entry)
        self.cumulative_logprob += value

    @property
    def has_news(self) -> bool:
        return self.num_shown >= 0 and (self.num_tokens > self.num_shown or self.finish_reason is not None)

    def is_due(self, interval: int) -> bool:
        new = self.num_tokens - self.num_shown
        is_first_or_last = self.num_shown == 0 or self.finish_reason is not None
        return self.has_news and (is_first_or_last or new >= (self.params.stream_interval or interval))

    def show(self, is_delta: bool) -> CompletionOutput:
        start, text_start = (self.num_shown, self.text_shown) if is_delta else (0, 0)
        num_prompt = len(self.group.prompt_token_ids)
        self.num_shown = self.num_tokens if self.finish_reason is None else -1
        self.text_shown = len(self.text)
        return CompletionOutput(
            index=self.index,
            text="".join(self.text[text_start:]),
            token_ids=self.tokens[num_prompt + start :].tolist(),
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[start:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            seed=None if self.params.temperature == 0.0 else _signed(self.seed),
        )

    def _append(self, text: str) -> None:
        if self.matcher.matched is not None and self.params.include_stop_str_in_output:
            text += self.matcher.matched
        if text:
            self.text.append(text)


def logprob_of(tokenizer: Tokenizer, token: int, logprob: float, rank: int | None) -> Logprob:
    text = tokenizer.token_text(token)
    return Logprob(logprob, rank, text, tokenizer.raw_bytes(token) if "\ufffd" in text else None)


def entry_of(
    tokenizer: Tokenizer, token: int, chosen: Logprob, count: int, top_ids: np.ndarray, top_logprobs: np.ndarray
) -> dict[int, Logprob]:
    """Return the log-probabilities of `token`, then of the `count` likeliest tokens; -1: all."""
    end = None if count == -1 else count
    entry = {token: chosen}
    for rank, (other, logprob) in enumerate(zip(top_ids[:end].tolist(), top_logprobs[:end].tolist(), strict=True), 1):
        if other not in entry:
            entry[other] = logprob_of(tokenizer, other, logprob, rank)
    return entry


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request: a prompt and its `n` sequences."""

    request_id: str
    internal_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    metrics: RequestMetrics
    kind: RequestOutputKind
    language: Language
    states: dict[str, Any] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)
    num_cached_tokens: int | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.language.model.tokenizer

    @property
    def is_finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def is_due(self, interval: int) -> bool:
        """Return whether an output is due; `interval` is the default number of new tokens."""
        if self.is_finished:
            return True
        is_final_only = self.kind is RequestOutputKind.FINAL_ONLY
        return not is_final_only and any(sequence.is_due(interval) for sequence in self.sequences)

    def show(self) -> RequestOutput:
        """Return the output; a delta includes only sequences with new tokens."""
        is_delta = self.kind is RequestOutputKind.DELTA
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sequence.show(is_delta) for sequence in self.sequences if not is_delta or sequence.has_news],
            finished=self.is_finished,
            metrics=replace(self.metrics),
            num_cached_tokens=self.num_cached_tokens,
            internal_id=self.internal_id,
        )

    def show_failure(self, why: str) -> RequestOutput:
        for sequence in self.sequences:
            sequence.finish_reason, sequence.stop_reason = "error", why
        ends = [
            CompletionOutput(sequence.index, "", [], finish_reason="error", stop_reason=why)
            for sequence in self.sequences
        ]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=ends,
            finished=True,
            internal_id=self.internal_id,
        )


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed
