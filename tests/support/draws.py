"""Sampling inputs, samples drawn from them, and penalties in numpy."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.sampling.sampler import Extras, Sampled, SamplingRows, Variant, pack_row, sample, unpack_rows
from jaxllm.sampling.vocab_parallel import Vocabulary
from jaxllm.sampling_params import SamplingParams

V = 24
HISTORY = 8
MANY = 20_000  # draws for a distribution
EXTRAS = Extras(V)
WHOLE = Vocabulary(V)

jitted = jax.jit(partial(sample, vocabulary=WHOLE), static_argnames=("variant", "num_logprobs"))


def rows_of(
    params: list[SamplingParams], prompt_length: int = 3, stop_ids: tuple[int, ...] = (), vocab_size: int = V
) -> SamplingRows:
    packed = [pack_row(each, each.seed or 0, prompt_length, stop_ids, vocab_size) for each in params]
    return unpack_rows(jnp.asarray(np.stack(packed)))


def padded(rows: np.ndarray | jax.Array, count: int) -> np.ndarray:
    """Pad by repeating the last row, so that few shapes are compiled."""
    rows = np.asarray(rows)
    return np.concatenate([rows, np.repeat(rows[-1:], count - len(rows), axis=0)])


def draw(
    logits: np.ndarray,
    rows: SamplingRows,
    variant: Variant,
    positions: np.ndarray | None = None,
    history: np.ndarray | None = None,
    batch: int | None = None,
    extras: np.ndarray | None = None,
) -> Sampled:
    """Sample in a batch of 1,024 rows, of MANY, or of `batch`; return the rows without padding."""
    count = len(logits)
    batch = batch or (1024 if count <= 1024 else MANY)
    positions = np.full(count, 6, np.int32) if positions is None else positions
    history = np.zeros((count, HISTORY), np.int32) if history is None else history
    # Values outside of the row's own extras must not matter.
    extras = np.full((count, EXTRAS.width), 1, np.int32) if extras is None else extras
    logits, rows, positions, history, extras = jax.tree.map(
        lambda each: padded(each, batch), (logits, rows, positions, history, extras)
    )
    sampled = jitted(logits, rows, positions, history, EXTRAS.unpack(extras), variant=variant, num_logprobs=5)
    return jax.tree.map(lambda each: np.asarray(each)[:count], sampled)


def random_logits(num_rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 2.0, (num_rows, V)).astype(np.float32)


def naive_penalized(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    result = logits.astype(np.float64).copy()
    for token in range(len(result)):
        if token in prompt or token in output:
            factor = params.repetition_penalty
            result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
        result[token] -= params.frequency_penalty * output.count(token)
        result[token] -= params.presence_penalty * (token in output)
    return result
