"""Converts prompts and parameters to queued requests.

`InputProcessor.accept` and the module's functions are thread-safe.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm import combinations
from jaxllm.config import EngineConfig
from jaxllm.engine import sequence
from jaxllm.engine.accepted import Accepted
from jaxllm.engine.features.feature import Features
from jaxllm.engine.language import Language
from jaxllm.engine.prompts import Prompt, checked_ids, parts_of
from jaxllm.engine.sequence import SequenceGroup
from jaxllm.errors import UserError, too_long
from jaxllm.outputs import RequestMetrics
from jaxllm.request_params import RequestParams
from jaxllm.sampling import sampler
from jaxllm.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams, validate_for_model
from jaxllm.scheduler import scheduler
from jaxllm.scheduler.block_pool import content_root
from jaxllm.scheduler.state import Limits, Request
from jaxllm.text import detokenizer
from jaxllm.text.repetition_detector import RepetitionDetector
from jaxllm.text.stop_strings import StopMatcher
from jaxllm.text.tokenizer import Tokenizer

_BAD_WORD_CHARACTERS = 32  # of a token in bad_words, at most, on average


class InputProcessor:
    """Converts requests to sequences; all but `accept` is for the engine's thread."""

    def __init__(
        self, config: EngineConfig, language: Language, limits: Limits, extras: sampler.Extras, features: Features
    ) -> None:
        self._config = config
        self._language = language
        self._limits = limits
        self._extras = extras
        self._features = features
        self.random = np.random.default_rng(config.seed % 2**64)
        self._num_sequences = 0

    def accept(
        self, request_id: str, prompt: Prompt, params: RequestParams | None, priority: int, options: Mapping[str, Any]
    ) -> Accepted:
        """Validate and tokenize a request; raise UserError if it is invalid. Thread-safe.

        `prompt` is as in `parts_of`, for a pooling model with "token_type_ids". `options` are those of features.
        """
        unknown = options.keys() - self._features.options
        if unknown:
            raise TypeError(f"a request has no {', '.join(sorted(unknown))}")
        accepted = Accepted(
            request_id=request_id,
            internal_id=request_id,
            name=request_id,
            given=prompt,
            asked=params,
            options=options,
            priority=priority,
            language=self._language,
            params=params if isinstance(params, SamplingParams) else self._language.model.default_params,
        )
        for claim in self._features.claim:
            claim(accepted)
        self._check(params, priority)
        if not accepted.prompt_token_ids:
            self._read(accepted)
        for accept in self._features.accept:
            accept(accepted)
        scheduler.check_fits(self._limits, len(accepted.prompt_token_ids), accepted.limit)
        return accepted

    def _check(self, params: object, priority: object) -> None:
        if params is not None and not isinstance(params, (SamplingParams, *self._features.takes)):
            raise UserError(f"Sampling parameters must be a SamplingParams, got {type(params).__name__}.", "params")
        if isinstance(priority, bool) or not isinstance(priority, int | np.integer):
            raise UserError(f"priority must be an integer, got {priority!r}.", "priority")
        if priority and self._config.scheduling_policy != "priority":
            raise UserError(
                f"priority is {priority}, but scheduling_policy is {self._config.scheduling_policy!r}; "
                "start the engine with scheduling_policy='priority'.",
                "priority",
            )

    def _read(self, accepted: Accepted) -> None:
        config, model, params = self._config, accepted.language.model, accepted.params
        validate_for_model(params, model.vocab_size, config.max_logprobs, model.eos_ids, self._extras.processors)
        if params.stop and config.skip_tokenizer_init:
            raise combinations.refusal("stop", "skip_tokenizer_init")
        accepted.bad_words = read_bad_words(params.bad_words, model.tokenizer)
        check_allows_a_token(params, accepted.bad_words, model.eos_ids)
        longest = model.max_model_len
        accepted.prompt, ids, accepted.salt = read_prompt(
            accepted.given, params, model.tokenizer, model.vocab_size, longest
        )
        if len(ids) + params.min_tokens > longest:
            raise too_long(longest, len(ids), params.min_tokens)
        accepted.prompt_token_ids, accepted.num_sequences = tuple(ids), params.n
        accepted.limit = longest if params.max_tokens is None else min(longest, len(ids) + params.max_tokens)

    def make_group(self, accepted: Accepted, now: float) -> tuple[SequenceGroup, list[Request]]:
        params = accepted.params
        group = SequenceGroup(
            request_id=accepted.request_id,
            internal_id=accepted.internal_id,
            prompt=accepted.prompt,
            prompt_token_ids=accepted.prompt_token_ids,
            metrics=RequestMetrics(arrival_time=now),
            kind=params.output_kind,
            language=accepted.language,
        )
        root, matcher = self._root(accepted), StopMatcher.of(params.stop)
        group.sequences += [
            self._make_sequence(group, index, accepted, matcher) for index in range(accepted.num_sequences)
        ]
        for begin in self._features.begin:
            begin(accepted, group)
        return group, [self._make_request(accepted, own, root) for own in group.sequences]

    def _make_request(self, accepted: Accepted, own: sequence.Sequence, root: bytes | None) -> Request:
        params, name = accepted.params, accepted.name
        fields: dict[str, Any] = {"root": root, "reads_cache": not params.skip_reading_prefix_cache}
        for schedule in self._features.schedule:
            schedule(own, fields)
        return Request(
            sequence_id=own.sequence_id,
            tokens=own.tokens,
            num_prompt=len(accepted.prompt_token_ids),
            limit=accepted.limit,
            stop_ids=tuple(own.eos_ids) + tuple(set(params.stop_token_ids) - own.eos_ids),
            priority=accepted.priority,
            name=f"{name}[{own.index}]" if accepted.num_sequences > 1 else name,
            **fields,
        )

    def _root(self, accepted: Accepted) -> bytes | None:
        """Return the root of a request's digests, None if its blocks are not shared."""
        if self._limits.whole_prompts:
            return None
        if self._config.enable_prefix_caching:
            return content_root(salt=accepted.salt, content=accepted.content)
        # The n sequences of a prompt share blocks.
        return content_root(salt=f"{self._num_sequences}".encode()) if accepted.num_sequences > 1 else None

    def pack(self, accepted: Accepted, group: SequenceGroup) -> None:
        """Choose a request's seeds and pack its sampling parameters, unless a feature packed them.

        Separate from `make_group`, so that a failure there changes no later seed.
        """
        params, extras = accepted.packed or accepted.params, self._extras
        if all(own.row is not None for own in group.sequences):
            return
        seed = params.seed
        if seed is None:
            # Random seeds depend on the order of arrival.
            seed = self._config.seed if self._config.deterministic else int(self.random.integers(2**63))
        num_prompt, num_bad = len(group.prompt_token_ids), sum(map(len, accepted.bad_words))
        vocab_size = self._language.model.vocab_size
        for own in group.sequences:
            own.seed = (seed + own.index) % 2**64
            own.row = sampler.pack_row(
                params, own.seed, num_prompt, own.stop_ids, vocab_size, num_bad, extras.bits(params)
            )
            own.extras = extras.pack(params, accepted.bad_words)

    def _make_sequence(
        self, group: SequenceGroup, index: int, accepted: Accepted, matcher: StopMatcher
    ) -> sequence.Sequence:
        self._num_sequences += 1
        model, ids, params = accepted.language.model, group.prompt_token_ids, accepted.params
        is_reported = params.logprobs is not None or params.logprob_token_ids is not None
        return accepted.sequence_type(
            sequence_id=self._num_sequences,
            group=group,
            index=index,
            params=params,
            eos_ids=frozenset() if params.ignore_eos else model.eos_ids,
            variant=sampler.needs(params),
            tokens=array("i", ids),
            detokenizer=detokenizer.begin(model.tokenizer, ids, params),
            matcher=matcher,
            stop_tokens=stop_tokens_of(params, model.tokenizer),
            repetition=RepetitionDetector(params.repetition_detection) if params.repetition_detection else None,
            logprobs=[] if is_reported else None,
        )


def stop_tokens_of(params: SamplingParams, tokenizer: Tokenizer) -> dict[int, str]:
    """Return the stop strings that are special tokens, by id; empty if text may contain these."""
    if not params.stop or not params.skip_special_tokens:
        return {}
    found = {tokenizer.token_id(stop): stop for stop in params.stop if tokenizer.is_special(stop)}
    return {token: stop for token, stop in found.items() if token is not None}


def read_prompt(
    prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer, vocab_size: int, max_model_len: int
) -> tuple[str | None, list[int], bytes]:
    """Return a prompt's text, checked token ids and cache salt; raise UserError if it is invalid.

    It must leave room for one token, or be cut by `truncate_prompt_tokens`.
    """
    text, ids, salt = parts_of(prompt)
    if ids is None:
        assert text is not None
        ids = tokenizer.encode(text_to_encode(text, params, tokenizer, max_model_len))
    if not len(ids):
        raise UserError("The decoder prompt cannot be empty", "prompt")
    if (kept := num_kept(params, max_model_len)) is not None:
        ids = ids[-kept:]
    if len(ids) >= max_model_len:
        raise too_long(max_model_len, len(ids), None)
    return text, checked_ids(ids, vocab_size), salt


def text_to_encode(text: str, params: SamplingParams, tokenizer: Tokenizer, max_model_len: int) -> str:
    """Return the text to tokenize: the prompt, or the end that `truncate_prompt_tokens` keeps.

    Tokenizing 8 MiB to keep 8 tokens took 5 s. Raises ContextLengthError if it must exceed the context.
    """
    kept = num_kept(params, max_model_len)
    if kept is not None:
        return tokenizer.end_of(text, kept)
    tokenizer.check_length(text, max_model_len)
    return text


def num_kept(params: SamplingParams, max_model_len: int) -> int | None:
    """Return the number of last prompt tokens to keep, None for all; raise UserError beyond the context."""
    asked = params.truncate_prompt_tokens
    if asked is not None and asked > max_model_len:
        message = f"truncate_prompt_tokens value ({asked}) is greater than max_model_len ({max_model_len})."
        raise UserError(f"{message} Please select a smaller truncation size.", "truncate_prompt_tokens", asked)
    if asked != -1:
        return asked
    return max(1, max_model_len - (params.max_tokens or 1))


def read_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of forbidden words, each without and with a leading space.

    vLLM drops the second if its number of tokens differs.
    """
    most = MAX_BAD_WORD_TOKENS
    names = {word.lstrip(" ") for word in words}
    sequences: tuple[tuple[int, ...], ...] | None = None
    if len(names) <= most and sum(map(len, names)) <= most * _BAD_WORD_CHARACTERS:  # checked before tokenizing
        texts = [text for name in sorted(names) for text in (name, " " + name)]
        spelled = dict.fromkeys(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        # Drop those with a banned suffix.
        sequences = tuple(one for one in spelled if one and not any(one[at:] in spelled for at in range(1, len(one))))
    if sequences is None or sum(map(len, sequences)) > most:
        raise UserError(
            f"bad_words may have at most {most} tokens together, each word counted with and without a space before it; "
            "give fewer.",
            "bad_words",
        )
    return sequences


def check_allows_a_token(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], eos_token_ids: Collection[int]
) -> None:
    """Raise UserError if bad words and `min_tokens` forbid all `allowed_token_ids` in the first position."""
    if params.allowed_token_ids is None:
        return
    left = set(params.allowed_token_ids).difference(word[0] for word in bad_words if len(word) == 1)
    if params.min_tokens > 0:
        left -= {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    if not left:
        raise UserError(
            "allowed_token_ids leave no token that can come first: bad_words, or min_tokens, forbid all of them.",
            "allowed_token_ids",
        )
