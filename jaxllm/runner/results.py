"""Results of a step: joined into one array by the program, and split on the host."""

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

MOST_LOGPROBS = 20  # more are scored from whole rows (scoring.py)


@dataclass(frozen=True, slots=True)
class Scored:
    """A position to score after the step."""

    sequence_id: int
    position: int
    index: int  # of the previous token in the step
    token: int
    is_whole: bool


class Score(NamedTuple):
    """The log-probabilities at one position."""

    of: Scored
    logprob: float
    rank: int
    top_logprobs: np.ndarray  # float32[n], descending; n is V if `is_whole`
    top_ids: np.ndarray  # int32[n]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A step's results on the host, by row of the plan."""

    tokens: np.ndarray  # int32[R]; int32[R, W] with `counts`
    is_finite: np.ndarray  # bool[R]
    logprob: np.ndarray | None = None  # float32[R]; fields up to `reported` depend on the variant
    rank: np.ndarray | None = None  # int32[R]
    top_logprobs: np.ndarray | None = None  # float32[R, n]
    top_ids: np.ndarray | None = None  # int32[R, n]
    reported: np.ndarray | None = None  # float32[R, MAX_REPORTED_TOKENS]
    # Of steps that verify drafts; their log-probabilities are of every token.
    counts: np.ndarray | None = None  # int32[R]: accepted drafts plus one
    places: np.ndarray | None = None  # int[R]: of a row's first token in the log-probabilities
    side: dict[str, Any] = field(default_factory=dict)  # of features, by name


def join(sampled: Sampled) -> jax.Array:
    """Return all results as columns, int32[R, W], for one transfer to the host."""
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
    width = 2
    if variant in (Variant.FILTERED, Variant.FULL):
        width = 4 + 2 * num_logprobs + (MAX_REPORTED_TOKENS if variant is Variant.FULL else 0)
    return width + 2 * drafts


def num_logprobs(max_logprobs: int, vocab_size: int) -> int:
    """Return how many likeliest tokens a step reports: at most MOST_LOGPROBS, which -1 selects."""
    return min(MOST_LOGPROBS if max_logprobs == -1 else max_logprobs, MOST_LOGPROBS, vocab_size)


def read_verified(joined: np.ndarray, plan: Plan, num_logprobs: int) -> StepOutput:
    """Split the results of a program that verifies drafts."""
    joined, (counts, drafted) = joined[:, :-2], joined[:, -2:].T
    result = read(joined, plan.num_tokens, num_logprobs)
    if not plan.num_drafts:  # a chunk samples after its last token
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
    """Split a step's results, int32[R, W], without padding after `num_rows`."""
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
