"""The expected result of a beam search: the search of transformers over the whole vocabulary, for one request alone.

A log-probability is a hash of the sequence and the token. Each step considers all candidates of all beams, while
production considers the few likeliest of each beam.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from jaxllm.beam_search_params import BeamSearchParams
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from tests.simulation.oracle import BROKEN, EOS, NUM_LOGPROBS, VOCABULARY, Outcome, Truth, logprob, mix


@lru_cache(maxsize=4096)
def likeliest(chain: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return all tokens and their log-probabilities after a sequence, sorted; a likely EOS makes searches end."""
    values = np.array([logprob(chain, token) for token in range(VOCABULARY)])
    values[EOS] /= 4
    tokens = np.argsort(-values, kind="stable")
    return tuple(tokens.tolist()), tuple(values[tokens].tolist())


def params_of_beams(asked: BeamSearchParams) -> SamplingParams:
    """Return sampling parameters with which code without beam search can treat a search."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=asked.max_tokens,
        ignore_eos=asked.ignore_eos,
        logprobs=NUM_LOGPROBS,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    object.__setattr__(params, "n", asked.beam_width)
    return params


def is_too_wide(asked: BeamSearchParams, num_slots: int) -> bool:
    """Whether an engine must refuse a search because of its width."""
    return asked.beam_width + (not asked.ignore_eos) > NUM_LOGPROBS or asked.beam_width > num_slots


def blocks_of(num_prompt: int, limit: int, width: int, size: int, shares: bool = True) -> int:
    """Return the most blocks that a search needs; if `shares`, beams share the full blocks of the prompt."""
    shared = num_prompt // size if shares else 0
    return shared + width * max(1, -(-(limit - 1) // size) - shared)


class Found(NamedTuple):
    """An output of a search."""

    tokens: tuple[int, ...]
    logprob: float
    score: float
    is_stopped: bool


class Oracle:
    """A beam search: its running beams, the best first, and its outputs."""

    def __init__(self, asked: BeamSearchParams, first: int, most: int) -> None:
        """Start a search; `first` is the hash of the prompt, `most` the tokens of the longest output."""
        self.asked = asked
        self.most = most
        self.running: list[tuple[tuple[int, ...], int, float]] = [((), first, 0.0)]  # tokens, chain, log-probability
        self.found: list[Found] = []
        self.is_over = False

    def step(self) -> None:
        """Choose the next token of all beams."""
        asked, width = self.asked, self.asked.beam_width
        length = len(self.running[0][0]) + 1
        candidates = [
            (total + own, tokens, chain, token)
            for tokens, chain, total in self.running
            for token, own in zip(*likeliest(chain), strict=True)
        ]
        candidates.sort(key=lambda each: -each[0])
        kept = candidates[: 2 * width]  # at most `width` of them end

        def hits(token: int) -> bool:
            return length == self.most or (token == EOS and not asked.ignore_eos)

        for total, tokens, _, token in kept[:width]:
            if hits(token):
                is_stopped = token == EOS and not asked.ignore_eos
                self.found.append(Found((*tokens, token), total, total / length**asked.length_penalty, is_stopped))
        self.found = sorted(self.found, key=lambda each: -each.score)[:width]
        going = [each for each in kept if not hits(each[3])][:width]
        is_full = len(self.found) == width
        self.is_over = length == self.most or (is_full and asked.early_stopping is True)
        if is_full and not self.is_over:
            reached = self.most if asked.early_stopping == "never" and asked.length_penalty > 0 else length
            self.is_over = not going[0][0] / reached**asked.length_penalty > self.found[-1].score
        if not self.is_over:
            self.running = [((*tokens, token), mix(chain, token), total) for total, tokens, chain, token in going]

    def outcome(self) -> list[Found]:
        """Return the outputs of the search at its end."""
        own = Oracle(self.asked, 0, self.most)
        own.running, own.found, own.is_over = self.running, [*self.found], self.is_over
        while not own.is_over:
            own.step()
        return own.found


class BeamTruth(Truth):
    """The expected sequence of a beam, which each fork replaces; `search` is the search that it belongs to."""

    def __init__(self, oracle: Oracle | None, asked: BeamSearchParams, *args: Any) -> None:
        super().__init__(*args)
        first = int(self.chain[self.num_prompt - 1])
        self.search = Oracle(asked, first, self.limit - self.num_prompt) if oracle is None else oracle
        self.version = 0

    def ensure(self, length: int) -> None:
        if length > self.length:
            raise AssertionError("the host chooses the tokens of beams")

    def become(self, tokens: Sequence[int], chain: Sequence[int], token: int) -> None:
        """Replace the sequence by a child of another: its tokens and hashes, and a new token."""
        self.length = len(tokens) + 1
        self.tokens[: self.length] = (*tokens, token)
        self.chain[: self.length] = (*chain, mix(int(chain[-1]), token))
        self.version += 1

    def outcome(self) -> Outcome:
        return Outcome((), "", "length", None)

    def final_text(self, found: Found) -> str:
        """Return the text of an output."""
        text = self.decoded(found.tokens[: len(found.tokens) - found.is_stopped], True)
        shows = self.search.asked.include_stop_str_in_output and found.is_stopped
        return text + ("</s>" if shows else "")

    def breaks_at(self) -> int | None:
        """Return 1 if decoding the current or the final sequences raises, else None."""
        if not self._is_broken:
            return None
        texts = [each.tokens for each in self.search.outcome()]
        texts.append(tuple(self.tokens[self.num_prompt : self.length].tolist()))
        return 1 if any(BROKEN in text for text in texts) else None
