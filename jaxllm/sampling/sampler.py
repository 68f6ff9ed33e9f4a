"""From a step's logits to its tokens, and the per-slot numbers that decide how. Pure functions, traced inside the step.

Knows no model, scheduler or tokenizer: lengths and ending ids are arguments. Every row is computed from that
row alone, and its randomness is a function of the request's seed and the token's position, so a request gets the same
tokens whatever runs beside it. Logits are one shard's columns of the vocabulary (vocabulary.py); ids are those of the
whole one. Letters: R rows of a batch, S slots, V vocabulary, Vx columns of one shard, Z ids that min_tokens holds back,
E entries of logit_bias.
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
ROW_WIDTH = _STOP_IDS_AT + MAX_MASKED_STOP_IDS  # int32 values of a packed row

Processor = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # see `processed`

_LARGEST_LOGIT = 1e30  # what penalties may make of a logit: divided by the least temperature it is still finite


class Variant(StrEnum):
    """The programs, each serving what the ones before it serve, with the same tokens. Chosen on the host, static."""

    GREEDY = "greedy"  # the likeliest token
    RANDOM = "random"  # and temperature
    FILTERED = "filtered"  # and top_k, top_p, min_p, min_tokens, log-probabilities
    FULL = "full"  # and penalties, and all that lies in the extras


@struct.dataclass
class SamplingRows:
    """What sampling needs to know of each row of a batch, R: the packed rows of its slots, taken apart."""

    temperature: jax.Array  # f32[R], 0 is greedy
    top_p: jax.Array  # f32[R], 1 keeps all
    min_p: jax.Array  # f32[R], 0 keeps all
    top_k: jax.Array  # i32[R], 0 keeps all
    repetition_penalty: jax.Array  # f32[R]
    presence_penalty: jax.Array  # f32[R]
    frequency_penalty: jax.Array  # f32[R]
    key: jax.Array  # u32[R, 2], key data of threefry2x32
    prompt_length: jax.Array  # i32[R], tokens
    min_length: jax.Array  # i32[R], tokens of prompt and output before which stop_ids cannot be sampled
    # How much of the slot's extras is this request's; what lies behind is a former one's.
    num_biased: jax.Array  # i32[R], entries of logit_bias
    num_bad_word_tokens: jax.Array  # i32[R]
    is_restricted: jax.Array  # i32[R], 1 where there are allowed_token_ids
    processors: jax.Array  # i32[R], bit i: it asked for the engine's i-th logits processor
    stop_ids: jax.Array  # i32[R, Z], V where there is none


@struct.dataclass
class Sampled:
    """The tokens of a step. Log-probabilities are of the raw logits, and None in the variants that make none."""

    tokens: jax.Array  # i32[R]
    is_finite: jax.Array  # bool[R]; False: the row's logits hold an infinity or NaN and its token means nothing
    logprob: jax.Array | None = None  # f32[R], of the sampled token
    rank: jax.Array | None = None  # i32[R], of the sampled token; 1 is the likeliest, equals share a rank
    top_logprobs: jax.Array | None = None  # f32[R, num_logprobs], falling
    top_ids: jax.Array | None = None  # i32[R, num_logprobs]
    reported: jax.Array | None = None  # f32[R, MAX_REPORTED_TOKENS], of logprob_token_ids; in the widest variant alone


@dataclass(frozen=True)
class Extras:
    """How a slot's extras lie in int32[F]: what few requests have.

    They lie beside the rows because they are many times as wide, and a row is sent to the device again with every chunk
    of a prompt; extras are sent once, ahead of the first step.
    """

    vocab_size: int
    processors: tuple[str, ...] = ()  # names, in the order of the bits of `SamplingRows.processors`

    @cached_property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Where each part lies: its offset and its shape."""
        sizes: dict[str, tuple[int, ...]] = {
            "bias": (2, MAX_BIASED_TOKENS),  # ids, then the bits of the values
            "bad_words": (2, MAX_BAD_WORD_TOKENS),  # sequences of ids end to end, then how far each is from its last
            "reported": (MAX_REPORTED_TOKENS,),  # ids
            "arguments": (len(self.processors), MAX_PROCESSOR_ARGUMENTS),  # bits of float32
            "allowed": (-(-self.vocab_size // 32),),  # a bit for each id
        }
        placed, offset = {}, 0
        for name, size in sizes.items():
            placed[name] = (offset, size)
            offset += int(np.prod(size))
        return placed

    @property
    def width(self) -> int:
        """Numbers of a slot, F."""
        offset, size = self.fields["allowed"]
        return offset + int(np.prod(size))

    def pack(self, params: SamplingParams, bad_words: Sequence[Sequence[int]]) -> np.ndarray | None:
        """Write a request's extras; None where it has none. What its row does not count is never read.

        `bad_words` are token sequences, at most MAX_BAD_WORD_TOKENS tokens together.
        """
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
        """Take int32[R, F] apart."""
        return {
            name: packed[:, offset : offset + int(np.prod(size))].reshape(len(packed), *size)
            for name, (offset, size) in self.fields.items()
        }

    def bits(self, params: SamplingParams) -> int:
        """Name the processors that a request asked for, a bit each."""
        return sum(1 << self.processors.index(name) for name in params.extra_args or ())


def has_extras(params: SamplingParams) -> bool:
    """Say whether a request has anything that is not in its row."""
    return bool(
        params.logit_bias
        or params.bad_words
        or params.logprob_token_ids
        or params.allowed_token_ids
        or params.extra_args
    )


def needs(params: SamplingParams) -> Variant:
    """Name the cheapest variant that serves a request."""
    if reads_history(params) or has_extras(params):
        return Variant.FULL
    is_filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    if is_filtered or params.min_tokens > 0 or params.logprobs is not None:
        return Variant.FILTERED
    return Variant.RANDOM if params.temperature > 0.0 else Variant.GREEDY


def reads_history(params: SamplingParams) -> bool:
    """Say whether a request's tokens so far change its next one otherwise than through the model."""
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
    """Write what sampling needs to know of a request as int32[ROW_WIDTH], floats by their bits.

    `seed` is the request's own or the one drawn for it, a 64-bit integer. `stop_ids` are all that `min_tokens` holds
    back, at most `MAX_MASKED_STOP_IDS` (`validate_for_model` sees to it), and are not kept when it is 0. `processors`
    are `Extras.bits`.
    """
    held_back = sorted(stop_ids) if params.min_tokens > 0 else []
    if len(held_back) > MAX_MASKED_STOP_IDS:
        raise EngineError(f"{len(held_back)} stop ids were given to a row of {MAX_MASKED_STOP_IDS}.")
    limits = np.finfo(np.float32)  # a float that is valid for a request can be 0 or infinity as a float32
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
    words = np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)  # what jax.random.key makes of 64 bits
    row[_KEY_AT:_STOP_IDS_AT] = words.view(np.int32)
    row[_STOP_IDS_AT : _STOP_IDS_AT + len(held_back)] = held_back
    return row


def unpack_rows(packed: jax.Array) -> SamplingRows:
    """Take rows of `pack_row`, int32[R, ROW_WIDTH], apart."""
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
    """Choose one token per row; the same ones, bit by bit, over how many shards the logits ever lie.

    The order: raw log-probabilities, logit_bias, logits processors, penalties, bad_words, allowed_token_ids, stop ids
    held back, greedy or temperature, min_p, top_k, top_p on what is left, choice. vLLM's is the same but for what bans
    tokens, which there comes first. The choice is the largest sum of logit and Gumbel noise, which draws from the
    softmax exactly and needs no normalisation (Maddison, Tarlow, Minka 2014, arXiv:1411.0030).

    Args:
        logits: f32[R, Vx], finite; this shard's columns of the vocabulary, whatever it likes in its padding.
        rows: of the batch. All ids are those of the whole vocabulary.
        positions: i32[R], index of the token to be sampled, which is the request's length so far.
        history: i32[R, length], prompt and output tokens, valid below `positions`; read by FULL alone.
        extras: of `Extras.unpack`, valid as far as `rows` says; read by FULL alone.
        variant: static; must serve every row.
        num_logprobs: static; likeliest tokens reported per row, at most V. Without effect before FILTERED.
        vocabulary: static; its size, and the axis that divides it.
        processors: static; the engine's, in the order of their bits in `rows.processors`.
        kernel: static; chooses instead of what follows the stop ids, for all variants alike, so that a request gets the
            same tokens in each; last bits may make them others than those of several shards. None and "xla" are the
            reductions of vocabulary.py, and all that several shards can do.
        mask: which tokens may come, i32[R, V / 32] with a bit for each id, and the rows that it holds for, i32[R]. It
            comes after everything else that bans tokens: a row of zeros is not finite.
    """
    is_finite = vocabulary.is_finite(logits)
    logits = vocabulary.without_padding(logits)
    adjusted = logits
    if variant is Variant.FULL:
        assert history is not None and extras is not None
        adjusted = biased(adjusted, rows, extras["bias"], vocabulary)
        adjusted = processed(adjusted, rows, positions, extras["arguments"], processors, vocabulary)
        adjusted = penalized(adjusted, rows, positions, history, vocabulary)
        adjusted = vocabulary.without_padding(adjusted)  # what was infinite may be just large now
        adjusted = without_bad_words(adjusted, rows, positions, history, extras["bad_words"], vocabulary)
        adjusted = restricted(adjusted, rows.is_restricted, extras["allowed"], vocabulary)
    if variant in (Variant.FILTERED, Variant.FULL):
        adjusted = _held_back(adjusted, rows, positions, vocabulary)
    if mask is not None:
        words_of_rows, is_masked = mask
        adjusted = restricted(adjusted, is_masked, words_of_rows, vocabulary)
    if variant is Variant.FULL or mask is not None:
        # A processor may return NaN, and a request may forbid every token that there is.
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
    """Return `logprob` and `rank` of one token per row, i32[R], the row's `top_logprobs` and `top_ids`, and `reported`.

    `logits` are f32[R, Vx] without padding; `asked` are further ids, i32[R, n]: of those outside the vocabulary, any
    number. Shapes and meanings are those of `Sampled`.
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
    """Return the log-probabilities of this shard's columns, f32[R, Vx]; `logits` are without padding."""
    largest = vocabulary.maximum(logits)
    total = from_words(vocabulary.total(words(jnp.exp(logits - largest))))
    return logits - (largest + jnp.log(total))


def biased(logits: jax.Array, rows: SamplingRows, bias: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Add each row's own entries of `bias`, i32[R, 2, E] of ids and values, to its logits, f32[R, Vx]."""
    is_own = jnp.arange(bias.shape[-1]) < rows.num_biased[:, None]  # [R, E]
    ids = jnp.where(is_own, bias[:, 0], vocabulary.size)  # out of range: dropped
    column = vocabulary.local(ids, logits.shape[-1])
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, column].add(lax.bitcast_convert_type(bias[:, 1], jnp.float32), mode="drop")


def penalized(
    logits: jax.Array, rows: SamplingRows, positions: jax.Array, history: jax.Array, vocabulary: Vocabulary
) -> jax.Array:
    """Apply the repetition penalty (Keskar et al. 2019, arXiv:1909.05858), then OpenAI's two penalties; f32[R, Vx].

    `history` (int32[R, length]) counts below `positions` only, from `rows.prompt_length` on as output.
    """
    num_rows, width = logits.shape
    index = jnp.arange(history.shape[1], dtype=jnp.int32)[None]
    is_output = (index >= rows.prompt_length[:, None]).astype(jnp.int32)  # [R, length]
    token = jnp.where(index < positions[:, None], history, vocabulary.size)  # out of range: dropped
    column = vocabulary.local(token, width)
    row = jnp.arange(num_rows)[:, None]
    counts = jnp.zeros((num_rows, 2, width), jnp.int32).at[row, is_output, column].add(1, mode="drop")
    in_output = counts[:, 1]
    penalty = rows.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0.0, logits / penalty, logits * penalty)
    logits = jnp.where(jnp.any(counts > 0, axis=1), repeated, logits)
    logits = logits - rows.frequency_penalty[:, None] * in_output.astype(jnp.float32)
    logits = logits - rows.presence_penalty[:, None] * (in_output > 0).astype(jnp.float32)
    # What a processor has banned stays banned.
    return jnp.where(logits == -jnp.inf, logits, jnp.clip(logits, -_LARGEST_LOGIT, _LARGEST_LOGIT))


def processed(
    logits: jax.Array,
    rows: SamplingRows,
    positions: jax.Array,
    arguments: jax.Array,
    processors: Sequence[Processor],
    vocabulary: Vocabulary,
) -> jax.Array:
    """Let the engine's logits processors change the rows that asked for them; f32[R, Vx].

    A processor is a function that JAX can trace, of logits f32[R, V], arguments f32[R, A] and positions i32[R], to
    f32[R, V]: all rows, each request's numbers, behind which are zeros, and the index of the token to be sampled. It
    must compute every row from that row alone. -inf bans a token. It sees the whole vocabulary: with processors, and
    only then, shards gather their logits.
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
    """Ban the last token of every bad word whose other tokens the output ends with; f32[R, Vx].

    `sequences` is i32[R, 2, W]: the tokens of all sequences end to end, and how far each stands before the last of its
    sequence.
    """
    row = jnp.arange(logits.shape[0])[:, None]
    index = jnp.arange(sequences.shape[-1], dtype=jnp.int32)[None]
    is_own = index < rows.num_bad_word_tokens[:, None]  # [R, W]
    token, distance = sequences[:, 0], jnp.where(is_own, sequences[:, 1], 0)
    at = positions[:, None] - distance  # where the token would have to stand
    stands = history.at[row, jnp.clip(at, 0, history.shape[1] - 1)].get() == token
    differs = (distance > 0) & ~((at >= rows.prompt_length[:, None]) & stands)
    num_different = jnp.zeros(token.shape, jnp.int32).at[row, index + distance].add(differs.astype(jnp.int32))
    is_banned = is_own & (distance == 0) & (num_different == 0)
    ids = jnp.where(is_banned, token, vocabulary.size)  # out of range: dropped
    column = vocabulary.local(ids, logits.shape[-1])
    return logits.at[row, column].set(-jnp.inf, mode="drop")


def restricted(logits: jax.Array, is_restricted: jax.Array, allowed: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Ban all tokens but those allowed, in rows that are restricted, i32[R]; f32[R, Vx].

    `allowed` is i32[R, V / 32], a bit for each id.
    """
    bits = allowed[:, :, None] >> jnp.arange(32, dtype=jnp.int32) & 1  # [R, V / 32, 32]
    is_allowed = vocabulary.columns(bits.reshape(len(bits), -1), logits.shape[-1]) > 0  # [R, Vx]
    return jnp.where(is_allowed | (is_restricted == 0)[:, None], logits, -jnp.inf)


def _held_back(logits: jax.Array, rows: SamplingRows, positions: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Make stop ids impossible in rows that are too short to end. After penalties, which leave -inf as it is."""
    is_short = (positions < rows.min_length)[:, None]
    ids = jnp.where(is_short, rows.stop_ids, vocabulary.size)  # [R, Z]; out of range: dropped
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
    """Choose tokens, i32[R], and say which rows `is_finite` on all shards; `logits` are f32[R, Vx] without padding."""
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
    """Do what `_chosen` does on one shard."""
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
    # Where tokens were banned, infinity stands for that; elsewhere the kernel has looked, and nothing else need to.
    return tokens, is_finite if has_filters or is_masked else is_all_finite


def kept_tokens(logits: jax.Array, divisor: jax.Array | float, rows: SamplingRows, vocabulary: Vocabulary) -> jax.Array:
    """Say which tokens min_p, top_k and top_p leave, as bool[R, Vx]; tokens that tie with the last one kept are kept.

    `logits` are f32[R, Vx], and `divisor`, f32[R, 1], is the temperature.

    Every filter keeps the tokens from some logit up, so each is a search for that logit and no row is sorted. Measured
    on two shared CPU cores against one sort and a cumulative sum: 2.8 ms for 20 at [64, 2048], 103 ms for 490 at
    [16, 152000].
    """
    scaled, highest = logits / divisor, vocabulary.maximum(logits)
    order = ordered(scaled)
    # The difference comes first: XLA:CPU may round a quotient otherwise in another fusion, and the likeliest token's
    # weight would not be 1, or even 0 where logits are large.
    weight = jnp.exp((logits - highest) / divisor)  # [R, Vx]
    kept = weight >= rows.min_p[:, None]

    limits = (rows.top_k > 0) & (rows.top_k < vocabulary.size)  # [R]
    wanted = jnp.where(limits, rows.top_k, vocabulary.size)

    def count(bounds: jax.Array) -> jax.Array:
        return jnp.sum(order[:, None] >= bounds[:, :, None], axis=-1, dtype=jnp.int32)  # [R, G]

    kept &= order >= vocabulary.search(count, wanted, limits)

    limits = rows.top_p < 1.0  # [R]
    mass = masses(weight, from_words(vocabulary.total(words(weight))))
    mass = jnp.where(kept, mass, 0)
    # Never 0: the likeliest token's mass is not, and `pack_row` keeps top_p a normal float; so one token is left.
    wanted = rows.top_p * vocabulary.total(jnp.sum(mass, axis=-1)).astype(jnp.float32)

    def mass_from(bounds: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(order[:, None] >= bounds[:, :, None], mass[:, None], 0), axis=-1)  # [R, G]

    return kept & ((order >= vocabulary.search(mass_from, wanted, limits)) | ~limits[:, None])
