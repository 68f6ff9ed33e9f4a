"""The timestamp rule of speech models that needs a step's logits, as Whisper's (Radford et al. 2022, section 4.5).

If the timestamps together are likelier than the likeliest other token, one of them must follow. Letters: R rows, V
vocabulary, Vx vocabulary of one shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.sampling import sampler
from jaxllm.sampling.vocab_parallel import Vocabulary
from pallas_kernels.sampling.xla import from_words, words

NO_RULE, MASKED, TIMED = 0, 1, 2  # a row of masks: unused, restricts tokens, is also subject to the rule


def first_timestamp(generation_config: Mapping[str, Any], vocab_size: int) -> int | None:
    """Return the token of 0.00 s, after which all tokens are timestamps; None without timestamps."""
    before = generation_config.get("no_timestamps_token_id")
    return before + 1 if type(before) is int and 0 <= before < vocab_size - 1 else None


def narrowed(
    logits: jax.Array, mask: tuple[jax.Array, jax.Array], first: int, vocabulary: Vocabulary
) -> tuple[jax.Array, jax.Array]:
    """Return masks that allow timestamps only in rows to which the rule applies.

    `logits` are f32[R, Vx]; `mask` has allowed tokens, i32[R, V / 32], and a kind for each row, i32[R].
    """
    allowed, kinds = mask
    logits = vocabulary.without_padding(logits)
    logits = sampler.restricted(logits, kinds, allowed, vocabulary)
    is_time = vocabulary.ids(logits.shape[-1]) >= first
    times = jnp.where(is_time, logits, -jnp.inf)
    largest = vocabulary.maximum(times)  # [R, 1]
    total = from_words(vocabulary.total(words(jnp.exp(times - jnp.where(jnp.isfinite(largest), largest, 0.0)))))
    others = vocabulary.maximum(jnp.where(is_time, -jnp.inf, logits))
    applies = (kinds == TIMED)[:, None] & jnp.isfinite(largest) & (largest + jnp.log(total) > others)
    bits = np.zeros(32 * allowed.shape[1], np.uint8)
    bits[first:] = 1
    of_times = jnp.asarray(np.packbits(bits, bitorder="little").view("<i4"))
    return jnp.where(applies, allowed & of_times, allowed), kinds
