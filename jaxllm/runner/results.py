"""Results of a step: how a program joins them in one array, and how the host reads that array.

Letters: R rows, W columns, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.sampling.sampler import Sampled, Variant
from jaxllm.sampling_params import MAX_REPORTED_TOKENS
from jaxllm.scheduler.state import Plan

MOST_LOGPROBS = 20  # likeliest tokens that a step reports; requests for more are scored from whole rows (scoring.py)


@dataclass(frozen=True, slots=True)
class Scored:
    """A position with log-probabilities to compute besides the step's own: in a prompt, or of the whole vocabulary."""

    sequence_id: int
    position: int  # of the token that is scored
    index: int  # of the token before it among the step's
    token: int  # at the position; 0 if it is to be sampled
    is_whole: bool  # wants all of the vocabulary


class Score(NamedTuple):
    """The log-probabilities at one position."""

    of: Scored
    logprob: float  # of the token
    rank: int
    top_logprobs: np.ndarray  # float32[n], falling; n is V where all are wanted
    top_ids: np.ndarray  # int32[n]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The sampled tokens of a step, on the host: a row for each row of its plan."""

    tokens: np.ndarray  # int32[R]; int32[R, W] with `counts`
    is_finite: np.ndarray  # bool[R]
    logprob: np.ndarray | None = None  # float32[R]; the fields down to `reported` only if the variant computes them
    rank: np.ndarray | None = None  # int32[R]
    top_logprobs: np.ndarray | None = None  # float32[R, n]
    top_ids: np.ndarray | None = None  # int32[R, n]
    reported: np.ndarray | None = None  # float32[R, MAX_REPORTED_TOKENS]
    # Of a step that verified drafts. The arrays of log-probabilities have an entry for each token of it.
    counts: np.ndarray | None = None  # int32[R]: tokens that a row sampled, drafts that were kept and one more
    places: np.ndarray | None = None  # int[R]: of its first token in those arrays
    side: dict[str, Any] = field(default_factory=dict)  # arrays and lists of features, by name


def join(sampled: Sampled) -> jax.Array:
    """Join all results along the columns, int32[R, W], so that they reach the host in one transfer."""
    columns = [sampled.tokens[:, None], sampled.is_finite[:, None].astype(jnp.int32)]
    if sampled.logprob is not None:
        assert sampled.rank is not None and sampled.top_logprobs is not None and sampled.top_ids is not None
        columns += [
            lax.bitcast_convert_type(sampled.logprob, jnp.int32)[:, None],
            sampled.rank[:, None],
            lax.bitcast_convert_type(sampled.top_logprobs, jnp.int32),
            sampled.top_ids,
        ]
        if sampled.reported is not None:
            columns.append(lax.bitcast_convert_type(sampled.reported, jnp.int32))
    return jnp.concatenate(columns, axis=1)


def result_width(variant: Variant, num_logprobs: int, drafts: bool) -> int:
    """Return the columns of a program's results, W, as `join` lays them out."""
    width = 2
    if variant in (Variant.FILTERED, Variant.FULL):
        width = 4 + 2 * num_logprobs + (MAX_REPORTED_TOKENS if variant is Variant.FULL else 0)
    return width + 2 * drafts


def num_logprobs(max_logprobs: int, vocab_size: int) -> int:
    """Return how many of the likeliest tokens a step reports, where requests may ask for `max_logprobs`; -1: all."""
    return min(MOST_LOGPROBS if max_logprobs == -1 else max_logprobs, MOST_LOGPROBS, vocab_size)


def read_verified(joined: np.ndarray, plan: Plan, num_logprobs: int) -> StepOutput:
    """Take the results of a program that verifies drafts apart, an entry for each token of the plan."""
    joined, (counts, drafted) = joined[:, :-2], joined[:, -2:].T
    result = read(joined, plan.num_tokens, num_logprobs)
    if not plan.num_drafts:  # a chunk's token follows its last
        last = np.cumsum(plan.lengths) - 1
        arrays = {own.name: getattr(result, own.name) for own in fields(result)}
        return replace(result, **{name: each[last] for name, each in arrays.items() if isinstance(each, np.ndarray)})
    places = np.cumsum(plan.lengths) - plan.lengths
    following = places[:, None] + np.arange(plan.lengths.max())
    return replace(
        result,
        tokens=result.tokens[np.minimum(following, plan.num_tokens - 1)],
        is_finite=result.is_finite[places],
        counts=counts[places],
        places=places,
        side={"drafted": drafted[places]},
    )


def read(joined: np.ndarray, num_rows: int, num_logprobs: int) -> StepOutput:
    """Take a step's results apart, int32[R, W] as `build` returns them; rows from `num_rows` on are padding."""
    joined = np.ascontiguousarray(joined[:num_rows].T)  # [W, R]
    tokens, is_finite = joined[0], joined[1].astype(np.bool_)
    if len(joined) == 2:
        return StepOutput(tokens, is_finite)
    ids_at, reported_at = 4 + num_logprobs, 4 + 2 * num_logprobs
    return StepOutput(
        tokens=tokens,
        is_finite=is_finite,
        logprob=joined[2].view(np.float32),
        rank=joined[3],
        top_logprobs=joined[4:ids_at].view(np.float32).T,
        top_ids=joined[ids_at:reported_at].T,
        reported=joined[reported_at:].view(np.float32).T if len(joined) > reported_at else None,
    )
