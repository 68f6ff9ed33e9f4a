"""Beam search as pure data, with the rules of transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Likeliest = tuple[Sequence[int], Sequence[float]]  # ids and log-probabilities, likeliest first


class Rules(NamedTuple):
    """The parameters of one search."""

    width: int
    most_tokens: int
    stop_ids: Collection[int]
    length_penalty: float
    early_stopping: bool | Literal["never"]


class Beam(NamedTuple):
    """A running beam."""

    member: int
    logprob: float


class Ended(NamedTuple):
    """A finished beam."""

    tokens: tuple[int, ...]
    logprob: float
    score: float
    is_stopped: bool  # by a stop token; else by length


class Search(NamedTuple):
    """The state of a search."""

    running: tuple[Beam, ...] = (Beam(0, 0.0),)  # likeliest first
    ended: tuple[Ended, ...] = ()  # at most `width`, best first
    is_over: bool = False


class Child(NamedTuple):
    """A next beam: sequence `member` continues sequence `parent` with a token."""

    member: int
    parent: int
    token: int


@dataclass(slots=True, eq=False)
class BeamSearch:
    """A running search: parameters, state, and next tokens received."""

    rules: Rules
    shows_stop: bool  # in the text
    state: Search = field(default_factory=Search)
    likeliest: dict[int, Likeliest] = field(default_factory=dict)  # next tokens by member


def num_needed(width: int, num_stop_ids: int) -> int:
    """Return how many of a beam's likeliest tokens to consider.

    These suffice for the `width` best beams that continue and the `width` best overall.
    """
    return width + num_stop_ids


def choose(
    search: Search, rules: Rules, outputs: Sequence[Sequence[int]], likeliest: Mapping[int, Likeliest]
) -> tuple[Search, list[Child]]:
    """Choose among the next tokens of all running beams; return the new state and the next step's beams.

    `outputs` and `likeliest` are by member. Ties prefer the earlier beam.
    """
    candidates = sorted(
        (
            (-(beam.logprob + logprob), rank, place, token)
            for rank, beam in enumerate(search.running)
            for place, (token, logprob) in enumerate(zip(*likeliest[beam.member], strict=True))
        ),
    )
    length = len(outputs[search.running[0].member]) + 1
    is_longest = length >= rules.most_tokens
    ended = [*search.ended]
    for negative, rank, _, token in candidates[: rules.width]:
        if is_longest or token in rules.stop_ids:
            tokens = (*outputs[search.running[rank].member], token)
            score = -negative / length**rules.length_penalty
            ended.append(Ended(tokens, -negative, score, token in rules.stop_ids))
    ended = sorted(ended, key=lambda each: -each.score)[: rules.width]  # stable
    chosen = [(-negative, rank, token) for negative, rank, _, token in candidates if token not in rules.stop_ids]
    chosen = chosen[: rules.width]
    if is_longest or _is_over(rules, ended, length, chosen[0][0]):
        return Search(search.running, tuple(ended), True), []
    children = _placed([(search.running[rank].member, token) for _, rank, token in chosen])
    running = [Beam(child.member, logprob) for child, (logprob, _, _) in zip(children, chosen, strict=True)]
    return Search(tuple(running), tuple(ended)), children


def _is_over(rules: Rules, ended: Sequence[Ended], length: int, best: float) -> bool:
    """Return whether no running beam can improve the result; `best` is their best log-probability."""
    if len(ended) < rules.width:
        return False
    if rules.early_stopping is True:
        return True
    reached = rules.most_tokens if rules.early_stopping == "never" and rules.length_penalty > 0.0 else length
    return best / reached**rules.length_penalty <= ended[-1].score


def _placed(chosen: Sequence[tuple[int, int]]) -> list[Child]:
    """Assign a sequence to each (parent, token): the parent's to its first child."""
    parents = {parent for parent, _ in chosen}
    left = iter(sorted(set(range(len(chosen))) - parents))
    children = []
    for parent, token in chosen:
        children.append(Child(parent if parent in parents else next(left), parent, token))
        parents.discard(parent)
    return children
