"""Compare the rules of beam searches with transformers' rules on random log-probabilities and penalties."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from jaxllm.engine.features.beams.rules import Rules, Search, choose, num_needed

VOCAB, MOST = 6, 12
PENALTIES = (-2.0, -1.0, -0.3, 0.0, 0.3, 1.0)


def _logprobs(seed: int, tokens: Sequence[int]) -> list[float]:
    """Return log-probabilities of the next token, with one likely token so that long outputs score well."""
    rng = random.Random(f"{seed} {list(tokens)}")
    likely = rng.randrange(VOCAB)
    return [-rng.uniform(0.01, 0.3) if token == likely else -rng.uniform(0.5, 4) for token in range(VOCAB)]


def _by_transformers(seed: int, rules: Rules) -> list[tuple[list[int], float]]:
    """Search with the algorithm of `_beam_search` in transformers 5."""
    running: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[list[int], float]] = []
    stops, keep = set(rules.stop_ids), max(2, 1 + len(rules.stop_ids)) * rules.width
    for length in range(1, rules.most_tokens + 1):
        grown = [
            ([*tokens, token], total + own)
            for tokens, total in running
            for token, own in enumerate(_logprobs(seed, tokens))
        ]
        grown = sorted(grown, key=lambda each: -each[1])[:keep]
        is_done = [tokens[-1] in stops or length == rules.most_tokens for tokens, _ in grown]
        best_few = list(zip(grown, is_done, strict=True))[: rules.width]
        finished += [(tokens, total / length**rules.length_penalty) for (tokens, total), done in best_few if done]
        finished = sorted(finished, key=lambda each: -each[1])[: rules.width]
        running = [each for each, done in zip(grown, is_done, strict=True) if not done][: rules.width]
        if not running:
            break
        if len(finished) < rules.width:
            continue
        if rules.early_stopping == "never" and rules.length_penalty > 0.0:
            best_length = rules.most_tokens
        else:
            best_length = length
        can_improve = running[0][1] / best_length**rules.length_penalty > finished[-1][1]
        if rules.early_stopping is True or not can_improve:
            break
    return finished


def _by_ours(seed: int, rules: Rules) -> list[tuple[list[int], float]]:
    search, outputs = Search(), [[] for _ in range(rules.width)]
    needed = num_needed(rules.width, len(rules.stop_ids))
    while not search.is_over:
        likeliest: dict[int, Any] = {}
        for beam in search.running:
            row = sorted(enumerate(_logprobs(seed, outputs[beam.member])), key=lambda each: -each[1])[:needed]
            likeliest[beam.member] = tuple(zip(*row, strict=True))
        search, children = choose(search, rules, outputs, likeliest)
        grown = {child.member: [*outputs[child.parent], child.token] for child in children}
        outputs = [grown.get(member, own) for member, own in enumerate(outputs)]
    return [(list(each.tokens), each.score) for each in search.ended]


@pytest.mark.parametrize("stopping", [True, False, "never"])
def test_searches_are_those_of_transformers_whatever_the_penalty(stopping: Any) -> None:
    for seed in range(200):
        rng = random.Random(seed)
        stops = tuple(rng.sample(range(VOCAB), rng.randrange(1, 3)))
        rules = Rules(rng.randrange(2, 5), MOST, stops, rng.choice(PENALTIES), stopping)
        due = _by_transformers(seed, rules)
        assert _by_ours(seed, rules) == [(tokens, pytest.approx(score)) for tokens, score in due], (seed, rules)
