"""Beam search as data: from the likeliest next tokens of all running beams to those that go on and those that end.

The rules are those of transformers' `_beam_search`. Knows tokens and log-probabilities; knows no engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Likeliest = tuple[Sequence[int], Sequence[float]]  # token ids and their log-probabilities, the likeliest first


class Rules(NamedTuple):
    """What is asked of one search."""

    width: int
    most_tokens: int  # of an output
    stop_ids: Collection[int]
    length_penalty: float
    early_stopping: bool | Literal["never"]


class Beam(NamedTuple):
    """A continuation that goes on."""

    member: int  # which of the search's sequences holds it
    logprob: float  # of all its tokens


class Ended(NamedTuple):
    """A continuation that has ended."""

    tokens: tuple[int, ...]
    logprob: float
    score: float
    is_stopped: bool  # by its last token; else it is as long as it may be


class Search(NamedTuple):
    """How far a search has come."""

    running: tuple[Beam, ...] = (Beam(0, 0.0),)  # the likeliest first
    ended: tuple[Ended, ...] = ()  # at most `width`, the best first
    is_over: bool = False


class Child(NamedTuple):
    """How a sequence goes on: as a continuation of another, or of itself."""

    member: int
    parent: int
    token: int


@dataclass(slots=True, eq=False)
class BeamSearch:
    """A search while it runs: what is asked, how far it has come, and which of its beams have answered."""

    rules: Rules
    shows_stop: bool  # whether a text ends with the token that ended it
    state: Search = field(default_factory=Search)
    likeliest: dict[int, Likeliest] = field(default_factory=dict)  # by member: its next tokens


def num_needed(width: int, num_stop_ids: int) -> int:
    """Return how many of a beam's likeliest tokens must be known: `width` of them go on, if all stop ids are likelier.

    transformers looks at (1 + num_stop_ids) * width candidates of all beams together, for the same reason; of a single
    beam no further ones can be among the best `width` that go on, nor among the best `width` of all.
    """
    return width + num_stop_ids


def choose(
    search: Search, rules: Rules, outputs: Sequence[Sequence[int]], likeliest: Mapping[int, Likeliest]
) -> tuple[Search, list[Child]]:
    """Choose among the next tokens of all running beams; return what the search becomes, and how its sequences go on.

    `outputs` are the tokens of each member so far, `likeliest` those that may be next, by member. Of equals the one of
    the beam before goes first. A search that is over has no children.
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
    ended = sorted(ended, key=lambda each: -each.score)[: rules.width]  # of equals the earlier one first
    chosen = [(-negative, rank, token) for negative, rank, _, token in candidates if token not in rules.stop_ids]
    chosen = chosen[: rules.width]
    if is_longest or _is_over(rules, ended, length, chosen[0][0]):
        return Search(search.running, tuple(ended), True), []
    children = _placed([(search.running[rank].member, token) for _, rank, token in chosen])
    running = [Beam(child.member, logprob) for child, (logprob, _, _) in zip(children, chosen, strict=True)]
    return Search(tuple(running), tuple(ended)), children


def _is_over(rules: Rules, ended: Sequence[Ended], length: int, best: float) -> bool:
    """Say whether a search ends before its beams are as long as they may be; `best` is of the best that goes on."""
    if len(ended) < rules.width:
        return False
    if rules.early_stopping is True:
        return True
    reached = rules.most_tokens if rules.early_stopping == "never" and rules.length_penalty > 0.0 else length
    return best / reached**rules.length_penalty <= ended[-1].score


def _placed(chosen: Sequence[tuple[int, int]]) -> list[Child]:
    """Give each child, a parent and a token, a sequence: the first of a parent its parent's, the others those left."""
    parents = {parent for parent, _ in chosen}
    left = iter(sorted(set(range(len(chosen))) - parents))
    children = []
    for parent, token in chosen:
        children.append(Child(parent if parent in parents else next(left), parent, token))
        parents.discard(parent)
    return children
