"""Programs that score positions of the previous step from its hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.model import decoder
from jaxllm.runner.results import Score, Scored, join, read
from jaxllm.runner.step_model import Leaves, StepModel, products_of
from jaxllm.sampling import sampler
from jaxllm.sampling.sampler import Sampled
from jaxllm.sampling.vocab_parallel import Vocabulary

SCORED_ROWS = 64  # positions per call


def build(model: StepModel, is_whole: bool) -> Callable[[Leaves, jax.Array, jax.Array], jax.Array]:
    """Return a function of (weights, hidden states, places) that scores Q positions.

    `places`, int32[Q, 2]: (index of the hidden state, token). The result is as a step's, int32[Q, W], with two unused
    columns first; if `is_whole`, float32[Q, V] log-probabilities, padded with minus infinity.
    """
    spec, params = model.spec, model.params
    params_tree = jax.tree.structure(params)

    def on_shard(params_leaves: Leaves, hidden: jax.Array, places: jax.Array) -> jax.Array:
        weights = jax.tree.unflatten(params_tree, params_leaves)
        vocabulary = Vocabulary(spec.vocab_size, model.layout)
        with products_of(model):
            logits = decoder.head(spec, weights, hidden.at[places[:, 0]].get(mode="clip"))  # [Q, Vx]
        logits = vocabulary.without_padding(logits)
        if is_whole:
            whole = sampler.all_logprobs(logits, vocabulary)
            return layout.gathered(whole, "vocab", 1) if layout.spans_processes else whole
        found = sampler.logprobs_of(logits, places[:, 1], None, model.num_logprobs, vocabulary)
        return join(Sampled(places[:, 1], jnp.ones(len(places), jnp.bool_), *found))

    on_shard.__name__ = "score_whole" if is_whole else "score"
    params_specs = tuple(leaf.sharding.spec for leaf in jax.tree.leaves(params))
    layout = model.layout
    is_divided = is_whole and not layout.spans_processes  # each process reads all of the result
    result, of_rank = layout.spec("ranks", "vocab" if is_divided else None), layout.spec("ranks")
    return layout.shard_map(on_shard, (params_specs, of_rank, of_rank), result)


def read_scores(wanted: Sequence[Scored], found: jax.Array | np.ndarray) -> list[Score]:
    values = np.asarray(found)
    scores = []
    for row, of in enumerate(wanted):
        if of.is_whole:
            order = np.argsort(-values[row], kind="stable")  # ties by id, as in lax.top_k
            logprob = values[row, of.token]
            rank = 1 + int(np.count_nonzero(values[row] > logprob))
            scores.append(Score(of, float(logprob), rank, values[row, order], order))
        else:
            one = read(values[row : row + 1], 1, (values.shape[1] - 4) // 2)
            assert one.logprob is not None and one.rank is not None
            assert one.top_logprobs is not None and one.top_ids is not None
            scores.append(Score(of, float(one.logprob[0]), int(one.rank[0]), one.top_logprobs[0], one.top_ids[0]))
    return scores
