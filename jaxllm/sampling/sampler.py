"""Sampling: turn a step's logits into tokens, traced inside the step.

A row depends only on its logits, seed and position. Vx columns of a shard, Z masked stop ids, E entries of
logit_bias, W tokens of bad words.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

import pallas_kernels
from jaxllm.checks import INT32_MAX
from jaxllm.errors import EngineError
from jaxllm.sampling.vocab_parallel import Vocabulary
from jaxllm.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BIASED_TOKENS,
    MAX_MASKED_STOP_IDS,
    MAX_PROCESSOR_ARGUMENTS,
    MAX_REPORTED_TOKENS,
    SamplingParams,
)
from pallas_kernels import Choice
from pallas_kernels.sampling.xla import from_words, gumbel, masses, ordered, words

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTEGERS = (
    *("top_k", "prompt_length", "min_length"),
    *("num_biased", "num_bad_word_tokens", "is_restricted", "processors"),
)
_KEY_AT = len(_FLOATS) + len(_INTEGERS)  # two words: high and low half of the seed
_STOP_IDS_AT = _KEY_AT + 2
ROW_WIDTH = _STOP_IDS_AT + MAX_MASKED_STOP_IDS

Processor = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

_LARGEST_LOGIT = 1e30  # finite after division by the smallest temperature


class Variant(StrEnum):
    """Sampling programs; each supports the parameters of those before it too, with the same tokens."""

    GREEDY = "greedy"  # argmax
    RANDOM = "random"  # adds temperature
    FILTERED = "filtered"  # adds filters, min_tokens and log-probabilities
    FULL = "full"  # adds penalties and `Extras`


@struct.dataclass
class SamplingRows:
    """Sampling parameters of a batch, one row per request."""

    temperature: jax.Array  # f32[R], 0 is greedy
    top_p: jax.Array  # f32[R], 1 disables
    min_p: jax.Array  # f32[R], 0 disables
    top_k: jax.Array  # i32[R], 0 disables
    repetition_penalty: jax.Array  # f32[R]
    presence_penalty: jax.Array  # f32[R]
    frequency_penalty: jax.Array  # f32[R]
    key: jax.Array  # u32[R, 2], threefry2x32
    prompt_length: jax.Array  # i32[R], tokens
    min_length: jax.Array  # i32[R], below which stop_ids are masked
    # Valid extras; the rest is stale.
    num_biased: jax.Array  # i32[R]
    num_bad_word_tokens: jax.Array  # i32[R]
    is_restricted: jax.Array  # i32[R], 1 with allowed_token_ids
    processors: jax.Array  # i32[R], a bit per logits processor
    stop_ids: jax.Array  # i32[R, Z], padded with V


@struct.dataclass
class Sampled:
    """The tokens of a step. Log-probabilities are of the raw logits, if the variant computes them."""

    tokens: jax.Array  # i32[R]
    is_finite: jax.Array  # bool[R]; False: the logits have inf or NaN, and the token is invalid
    logprob: jax.Array | None = None  # f32[R]
    rank: jax.Array | None = None  # i32[R]; 1 is the likeliest, ties share a rank
    top_logprobs: jax.Array | None = None  # f32[R, num_logprobs], descending
    top_ids: jax.Array | None = None  # i32[R, num_logprobs]
    reported: jax.Array | None = None  # f32[R, MAX_REPORTED_TOKENS]; FULL only


@dataclass(frozen=True)
class Extras:
    """Rarely used sampling parameters of a slot, int32[F].

    Sent once per request: rows, resent with every prompt chunk, are smaller.
    """

    vocab_size: int
    processors: tuple[str, ...] = ()  # in bit order of `SamplingRows.processors`

    @cached_property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        sizes: dict[str, tuple[int, ...]] = {
            "bias": (2, MAX_BIASED_TOKENS),  # ids, then bits of float32
            "bad_words": (2, MAX_BAD_WORD_TOKENS),  # concatenated sequences, then the distance to each one's last
            "reported": (MAX_REPORTED_TOKENS,),  # ids
            "arguments": (len(self.processors), MAX_PROCESSOR_ARGUMENTS),  # bits of float32
            "allowed": (-(-self.vocab_size // 32),),  # one bit per id
        }
        placed, offset = {}, 0
        for name, size in sizes.items():
            placed[name] = (offset, size)
            offset += int(np.prod(size))
        return placed

    @property
    def width(self) -> int:
        offset, size = self.fields["allowed"]
        return offset + int(np.prod(size))

    def pack(self, params: SamplingParams, bad_words: Sequence[Sequence[int]]) -> np.ndarray | None:
        """Return int32[F], None if not needed."""
        if not has_extras(params):
            return None
        packed = np.zeros(self.width, np.int32)
        part = {
            name: packed[offset : offset + int(np.prod(size))].reshape(size)
            for name, (offset, size) in self.fields.items()
        }
        bias = params.logit_bias or {}
        part["bias"][0, : len(bias)] = list(bias)
        part["bias"][1, : len(bias)] = np.array(list(bias.values()), np.float32).view(np.int32)
        tokens = [token for sequence in bad_words for token in sequence]
        part["bad_words"][0, : len(tokens)] = tokens
        part["bad_words"][1, : len(tokens)] = [at for sequence in bad_words for at in range(len(sequence) - 1, -1, -1)]
        reported = params.logprob_token_ids or ()
        part["reported"][: len(reported)] = reported
        for name, numbers in (params.extra_args or {}).items():
            most = np.finfo(np.float32).max
            values = np.clip(np.atleast_1d(np.asarray(numbers, np.float64)), -most, most).astype(np.float32)
            part["arguments"][self.processors.index(name), : len(values)] = values.view(np.int32)
        allowed = np.asarray(params.allowed_token_ids or (), np.int64)
        words = part["allowed"].view(np.uint32)
        np.bitwise_or.at(words, allowed // 32, np.uint32(1) << (allowed % 32).astype(np.uint32))
        return packed

    def unpack(self, packed: jax.Array) -> dict[str, jax.Array]:
        return {
            name: packed[:, offset : offset + int(np.prod(size))].reshape(len(packed), *size)
            for name, (offset, size) in self.fields.items()
        }

    def bits(self, params: SamplingParams) -> int:
        return sum(1 << self.processors.index(name) for name in params.extra_args or ())


def has_extras(params: SamplingParams) -> bool:
    return bool(
        params.logit_bias
        or params.bad_words
        or params.logprob_token_ids
        or params.allowed_token_ids
        or params.extra_args
    )


def needs(params: SamplingParams) -> Variant:
    if reads_history(params) or has_extras(params):
        return Variant.FULL
    is_filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    if is_filtered or params.min_tokens > 0 or params.logprobs is not None:
        return Variant.FILTERED
    return Variant.RANDOM if params.temperature > 0.0 else Variant.GREEDY


def reads_history(params: SamplingParams) -> bool:
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    return penalties != (1.0, 0.0, 0.0) or bool(params.bad_words)


def pack_row(
    params: SamplingParams,
    seed: int,
    prompt_length: int,
    stop_ids: Collection[int],
    vocab_size: int,
    num_bad_word_tokens: int = 0,
    processors: int = 0,
) -> np.ndarray:
    """Pack a request's sampling parameters as int32[ROW_WIDTH], floats as bits.

    `seed` has 64 bits; at most MAX_MASKED_STOP_IDS `stop_ids`, stored only with `min_tokens`.
    """
    held_back = sorted(stop_ids) if params.min_tokens > 0 else []
    if len(held_back) > MAX_MASKED_STOP_IDS:
        raise EngineError(f"{len(held_back)} stop ids were given to a row of {MAX_MASKED_STOP_IDS}.")
    limits = np.finfo(np.float32)  # Python floats may become 0 or inf in float32
    row = np.full(ROW_WIDTH, vocab_size, np.int32)
    row[: len(_FLOATS)] = np.array(
        [
            min(params.temperature, float(limits.max)),
            max(params.top_p, float(limits.tiny)),
            params.min_p,
            min(max(params.repetition_penalty, float(limits.tiny)), float(limits.max)),
            params.presence_penalty,
            params.frequency_penalty,
        ],
        np.float32,
    ).view(np.int32)
    min_length = min(prompt_length + params.min_tokens, INT32_MAX)
    row[len(_FLOATS) : _KEY_AT] = (
        *(min(params.top_k, vocab_size), prompt_length, min_length),
        *(len(params.logit_bias or ()), num_bad_word_tokens, params.allowed_token_ids is not None, processors),
    )
    words = np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)  # as jax.random.key
    row[_KEY_AT:_STOP_IDS_AT] = words.view(np.int32)
    row[_STOP_IDS_AT : _STOP_IDS_AT + len(held_back)] = held_back
    return row


def unpack_rows(packed: jax.Array) -> SamplingRows:
    floats = lax.bitcast_convert_type(packed[:, : len(_FLOATS)], jnp.float32)
    columns = {name: floats[:, at] for at, name in enumerate(_FLOATS)}
    columns |= {name: packed[:, len(_FLOATS) + at] for at, name in enumerate(_INTEGERS)}
    return SamplingRows(
        **columns,
        key=lax.bitcast_convert_type(packed[:, _KEY_AT:_STOP_IDS_AT], jnp.uint32),
        stop_ids=packed[:, _STOP_IDS_AT:],
    )


@partial(jax.jit, static_argnames=("variant", "num_logprobs", "vocabulary", "processors", "kernel"))
def sample(
    logits: jax.Array,
    rows: SamplingRows,
    positions: jax.Array,
    history: jax.Array | None,
    extras: Mapping[str, jax.Array] | None,
    variant: Variant,
    num_logprobs: int,
    vocabulary: Vocabulary,
    processors: Sequence[Processor] = (),
    kernel: Choice | None = None,
    mask: tuple[jax.Array, jax.Array] | None = None,
) -> Sampled:
    """Sample one token per row, bit-identical for any number of shards.

    Order: raw log-probabilities, logit_bias, logits processors, penalties, bad_words, allowed_token_ids, min_tokens,
    temperature, min_p, top_k, top_p, choice; vLLM bans tokens first. The choice is the argmax of logits plus Gumbel
    noise, an exact sample of the softmax (Maddison, Tarlow, Minka 2014, arXiv:1411.0030).

    Args:
        logits: f32[R, Vx], finite except in padding.
        positions: i32[R], the request's length.
        history: i32[R, length], valid below `positions`; FULL only.
        extras: of `Extras.unpack`; FULL only.
        variant: must support every row.
        num_logprobs: likeliest tokens to report, from FILTERED on.
        processors: in bit order of `rows.processors`.
        kernel: for all variants, so that they agree; last bits may differ from the sharded path. None and "xla" use
            `vocab_parallel`.
        mask: allowed tokens, i32[R, V / 32] with a bit per id, and i32[R], the rows to mask. Applied last; a row of
            zeros is reported as not finite.
    """
    is_finite = vocabulary.is_finite(logits)
    logits = vocabulary.without_padding(logits)
    adjusted = logits
    if variant is Variant.FULL:
        assert history is not None and extras is not None
        adjusted = biased(adjusted, rows, extras["bias"], vocabulary)
        adjusted = processed(adjusted, rows, positions, extras["arguments"], processors, vocabulary)
        adjusted = penalized(adjusted, rows, positions, history, vocabulary)
        adjusted = vocabulary.without_padding(adjusted)  # penalties clip -inf
        adjusted = without_bad_words(adjusted, rows, positions, history, extras["bad_words"], vocabulary)
        adjusted = restricted(adjusted, rows.is_restricted, extras["allowed"], vocabulary)
    if variant in (Variant.FILTERED, Variant.FULL):
        adjusted = _held_back(adjusted, rows, positions, vocabulary)
    if mask is not None:
        words_of_rows, is_masked = mask
        adjusted = restricted(adjusted, is_masked, words_of_rows, vocabulary)
    if variant is Variant.FULL or mask is not None:
        # A processor may return NaN; a request may ban every token.
        is_finite &= jnp.isfinite(vocabulary.maximum(adjusted)[:, 0])
    choose = _chosen
    if kernel is not None and kernel.name != "xla":
        choose = partial(_chosen_by_kernel, kernel, mask is not None)
    tokens, is_finite = choose(adjusted, is_finite, rows, positions, variant, vocabulary)
    if variant in (Variant.GREEDY, Variant.RANDOM):
        return Sampled(tokens, is_finite)
    asked = None if extras is None else extras["reported"]
    return Sampled(tokens, is_finite, *logprobs_of(logits, tokens, asked, num_logprobs, vocabulary))


def logprobs_of(
    logits: jax.Array, tokens: jax.Array, asked: jax.Array | None, num_logprobs: int, vocabulary: Vocabulary
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return `logprob`, `rank`, `top_logprobs`, `top_ids` and `reported`, as in `Sampled`.

    `logits` are f32[R, Vx] without padding; `asked` are ids, i32[R, n]. Values of invalid ids are arbitrary.
    """
    ids = tokens[:, None] if asked is None else jnp.concatenate([tokens[:, None], asked], axis=-1)  # [R, 1 + n]
    largest, top_logits, top_ids = vocabulary.top(logits, num_logprobs)
    bits = lax.bitcast_convert_type(vocabulary.at(logits, ids), jnp.uint32)
    totals = vocabulary.total(jnp.concatenate([words(jnp.exp(logits - largest)), bits], axis=-1))
    log_total = largest + jnp.log(from_words(totals[:, : -ids.shape[1]]))  # [R, 1]
    found = lax.bitcast_convert_type(totals[:, -ids.shape[1] :], jnp.float32)
    chosen = found[:, :1]
    rank = 1 + vocabulary.total(jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32))
    reported = None if asked is None else found[:, 1:] - log_total
    return (chosen - log_total)[:, 0], rank, top_logits - log_total, top_ids, reported


def all_logprobs(logits: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Return log-probabilities, f32[R, Vx], of logits without padding."""
    largest = vocabulary.maximum(logits)
    total = from_words(vocabulary.total(words(jnp.exp(logits - largest))))
    return logits - (largest + jnp.log(total))


def biased(logits: jax.Array, rows: SamplingRows, bias: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Add logit_bias, i32[R, 2, E] of ids and values, to logits f32[R, Vx]."""
    is_own = jnp.arange(bias.shape[-1]) < rows.num_biased[:, None]  # [R, E]
    ids = jnp.where(is_own, bias[:, 0], vocabulary.size)
    column = vocabulary.local(ids, logits.shape[-1])
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, column].add(lax.bitcast_convert_type(bias[:, 1], jnp.float32), mode="drop")


def penalized(
    logits: jax.Array, rows: SamplingRows, positions: jax.Array, history: jax.Array, vocabulary: Vocabulary
) -> jax.Array:
    """Apply the repetition penalty (Keskar et al. 2019, arXiv:1909.05858), then presence and frequency; f32[R, Vx].

    `history` (int32[R, length]) is valid below `positions`; output begins at `rows.prompt_length`.
    """
    num_rows, width = logits.shape
    index = jnp.arange(history.shape[1], dtype=jnp.int32)[None]
    is_output = (index >= rows.prompt_length[:, None]).astype(jnp.int32)  # [R, length]
    token = jnp.where(index < positions[:, None], history, vocabulary.size)
    column = vocabulary.local(token, width)
    row = jnp.arange(num_rows)[:, None]
    counts = jnp.zeros((num_rows, 2, width), jnp.int32).at[row, is_output, column].add(1, mode="drop")
    in_output = counts[:, 1]
    penalty = rows.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0.0, logits / penalty, logits * penalty)
    logits = jnp.where(jnp.any(counts > 0, axis=1), repeated, logits)
    logits = logits - rows.frequency_penalty[:, None] * in_output.astype(jnp.float32)
    logits = logits - rows.presence_penalty[:, None] * (in_output > 0).astype(jnp.float32)
    # Tokens that a processor banned stay banned.
    return jnp.where(logits == -jnp.inf, logits, jnp.clip(logits, -_LARGEST_LOGIT, _LARGEST_LOGIT))


def processed(
    logits: jax.Array,
    rows: SamplingRows,
    positions: jax.Array,
    arguments: jax.Array,
    processors: Sequence[Processor],
    vocabulary: Vocabulary,
) -> jax.Array:
    """Apply the logits processors that each row selects; f32[R, Vx].

    A processor is a traceable function (logits f32[R, V], arguments f32[R, A] padded with zeros, positions i32[R]) ->
    f32[R, V]. Rows must be independent; -inf bans a token.
    """
    if not processors:
        return logits
    whole = vocabulary.whole(logits)  # [R, V]
    numbers = lax.bitcast_convert_type(arguments, jnp.float32)  # [R, processors, A]
    for number, processor in enumerate(processors):
        asked = (rows.processors >> number & 1 > 0)[:, None]
        whole = jnp.where(asked, processor(whole, numbers[:, number], positions), whole)
    return vocabulary.columns(whole, logits.shape[-1])


def without_bad_words(
    logits: jax.Array,
    rows: SamplingRows,
    positions: jax.Array,
    history: jax.Array,
    sequences: jax.Array,
    vocabulary: Vocabulary,
) -> jax.Array:
    """Ban the last token of each bad word whose preceding tokens end the output; f32[R, Vx].

    `sequences` is i32[R, 2, W], as in `Extras`.
    """
    row = jnp.arange(logits.shape[0])[:, None]
    index = jnp.arange(sequences.shape[-1], dtype=jnp.int32)[None]
    is_own = index < rows.num_bad_word_tokens[:, None]  # [R, W]
    token, distance = sequences[:, 0], jnp.where(is_own, sequences[:, 1], 0)
    at = positions[:, None] - distance
    stands = history.at[row, jnp.clip(at, 0, history.shape[1] - 1)].get() == token
    differs = (distance > 0) & ~((at >= rows.prompt_length[:, None]) & stands)
    num_different = jnp.zeros(token.shape, jnp.int32).at[row, index + distance].add(differs.astype(jnp.int32))
    is_banned = is_own & (distance == 0) & (num_different == 0)
    ids = jnp.where(is_banned, token, vocabulary.size)
    column = vocabulary.local(ids, logits.shape[-1])
    return logits.at[row, column].set(-jnp.inf, mode="drop")


def restricted(logits: jax.Array, is_restricted: jax.Array, allowed: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Ban tokens outside `allowed`, i32[R, V / 32] with a bit per id, where `is_restricted`; f32[R, Vx]."""
    bits = allowed[:, :, None] >> jnp.arange(32, dtype=jnp.int32) & 1  # [R, V / 32, 32]
    is_allowed = vocabulary.columns(bits.reshape(len(bits), -1), logits.shape[-1]) > 0  # [R, Vx]
    return jnp.where(is_allowed | (is_restricted == 0)[:, None], logits, -jnp.inf)


def _held_back(logits: jax.Array, rows: SamplingRows, positions: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    is_short = (positions < rows.min_length)[:, None]
    ids = jnp.where(is_short, rows.stop_ids, vocabulary.size)
    column = vocabulary.local(ids, logits.shape[-1])
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, column].set(-jnp.inf, mode="drop")


def _chosen(
    logits: jax.Array,
    is_finite: jax.Array,
    rows: SamplingRows,
    positions: jax.Array,
    variant: Variant,
    vocabulary: Vocabulary,
) -> tuple[jax.Array, jax.Array]:
    if variant is Variant.GREEDY:
        return vocabulary.argmax(logits, is_finite)
    is_random = (rows.temperature > 0.0)[:, None]
    divisor = jnp.where(is_random, rows.temperature[:, None], 1.0)
    scaled = logits / divisor
    noise = gumbel(rows.key, positions, vocabulary.ids(logits.shape[-1]))
    scores = jnp.where(is_random, scaled + noise, logits)
    if variant is not Variant.RANDOM:
        scores = jnp.where(kept_tokens(logits, divisor, rows, vocabulary), scores, -jnp.inf)
    return vocabulary.argmax(scores, is_finite)


def _chosen_by_kernel(
    kernel: Choice,
    is_masked: bool,
    logits: jax.Array,
    is_finite: jax.Array,
    rows: SamplingRows,
    positions: jax.Array,
    variant: Variant,
    vocabulary: Vocabulary,
) -> tuple[jax.Array, jax.Array]:
    if vocabulary.shards != 1:
        raise ValueError("the kernel that chooses tokens is for one shard; setup chooses it for no more")
    has_noise = variant is not Variant.GREEDY
    has_filters = variant in (Variant.FILTERED, Variant.FULL)
    tokens, is_all_finite = pallas_kernels.sample(
        logits,
        rows.temperature if has_noise else None,
        rows.key if has_noise else None,
        positions if has_noise else None,
        rows.top_k if has_filters else None,
        rows.top_p if has_filters else None,
        rows.min_p if has_filters else None,
        implementation=kernel,
    )
    # With filters or a mask, -inf marks banned tokens.
    return tokens, is_finite if has_filters or is_masked else is_all_finite


def kept_tokens(logits: jax.Array, divisor: jax.Array | float, rows: SamplingRows, vocabulary: Vocabulary) -> jax.Array:
    """Return the tokens that pass min_p, top_k and top_p, bool[R, Vx]; ties with the last pass.

    `divisor`, f32[R, 1], is the temperature. Searching for thresholds instead of sorting: on two CPU cores 103 ms, not
    490, at [16, 152000].
    """
    scaled, highest = logits / divisor, vocabulary.maximum(logits)
    order = ordered(scaled)
    # Subtract first: XLA:CPU may round quotients differently between fusions, and the maximum's weight must be 1.
    weight = jnp.exp((logits - highest) / divisor)
    kept = weight >= rows.min_p[:, None]

    limits = (rows.top_k > 0) & (rows.top_k < vocabulary.size)  # [R]
    wanted = jnp.where(limits, rows.top_k, vocabulary.size)

    def count(bounds: jax.Array) -> jax.Array:
        return jnp.sum(order[:, None] >= bounds[:, :, None], axis=-1, dtype=jnp.int32)  # [R, G]

    kept &= order >= vocabulary.search(count, wanted, limits)

    limits = rows.top_p < 1.0  # [R]
    mass = masses(weight, from_words(vocabulary.total(words(weight))))
    mass = jnp.where(kept, mass, 0)
    # Positive, since `pack_row` keeps top_p normal: at least one token passes.
    wanted = rows.top_p * vocabulary.total(jnp.sum(mass, axis=-1)).astype(jnp.float32)

    def mass_from(bounds: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(order[:, None] >= bounds[:, :, None], mass[:, None], 0), axis=-1)  # [R, G]

    return kept & ((order >= vocabulary.search(mass_from, wanted, limits)) | ~limits[:, None])
