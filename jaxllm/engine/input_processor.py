"""From a caller's prompt and parameters to what the engine queues: checks, token ids, sequences, packed parameters.

Knows the model's tokenizer and limits; knows no queue and no device. `InputProcessor.accept` and the functions below it
may be called by any thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxllm.beam_search_params import BeamSearchParams
from jaxllm.config import EngineConfig
from jaxllm.engine import pooled_input, sequence
from jaxllm.engine.adapters import Adapter, Language
from jaxllm.engine.beams import BeamSearch, Rules, num_needed
from jaxllm.engine.model_info import ModelInfo
from jaxllm.engine.prompts import Prompt, checked_ids, parts_of
from jaxllm.engine.sequence import SequenceGroup
from jaxllm.errors import UserError, too_long
from jaxllm.outputs import RequestMetrics
from jaxllm.pooling_params import PoolingParams
from jaxllm.runner.results import MOST_LOGPROBS
from jaxllm.sampling import sampler
from jaxllm.sampling_params import MAX_BAD_WORD_TOKENS, RequestOutputKind, SamplingParams, validate_for_model
from jaxllm.scheduler import scheduler
from jaxllm.scheduler.block_pool import content_root
from jaxllm.scheduler.state import Limits, Request
from jaxllm.structured_output.grammars import Grammar
from jaxllm.text import detokenizer
from jaxllm.text.repetition_detector import RepetitionDetector
from jaxllm.text.stop_strings import StopMatcher
from jaxllm.text.tokenizer import Tokenizer

Params = SamplingParams | PoolingParams | BeamSearchParams
_BAD_WORD_CHARACTERS = 32  # that a token of bad_words has at most, on the average


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A request that has passed every check."""

    request_id: str  # the caller's
    internal_id: str  # the engine's, unique among all that run
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int
    salt: bytes
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences
    grammar: Grammar | None = None
    adapter: Adapter | None = None
    pooling: PoolingParams | None = None  # of a prompt that is pooled; `params` mean nothing then
    beams: BeamSearchParams | None = None  # of a beam search; `params` are those of each of its beams
    token_types: tuple[int, ...] | None = None
    num_sequences: int = 1  # outputs that it will have
    name: str  # for logs and recordings

    def limit(self, max_model_len: int) -> int:
        """Return the most tokens that prompt and output can have together."""
        if self.pooling is not None:
            return len(self.prompt_token_ids)
        if self.params.max_tokens is None:
            return max_model_len
        return min(max_model_len, len(self.prompt_token_ids) + self.params.max_tokens)


class InputProcessor:
    """Turns requests into sequences for one engine. All but `accept` belong to the engine's thread."""

    def __init__(
        self, config: EngineConfig, language: Language, limits: Limits, extras: sampler.Extras, num_logprobs: int
    ) -> None:
        """`num_logprobs` are those that every step returns."""
        self._config = config
        self._language = language
        self._model = language.model
        self._limits = limits
        self._extras = extras
        self._num_logprobs = num_logprobs
        self._random = np.random.default_rng(config.seed % 2**64)
        self._num_sequences = 0

    def accept(
        self, request_id: str, prompt: Prompt, params: Params | None, priority: int, adapter: Adapter | None = None
    ) -> Accepted:
        """Check a request and make its token ids; a problem with it is a UserError. Any thread may call this.

        `prompt` is text, token ids, or a mapping with "prompt" or "prompt_token_ids" and perhaps "cache_salt"; of a
        model that pools perhaps with "token_type_ids".
        """
        language = self._language if adapter is None else adapter.language
        config, model = self._config, language.model
        pooled_input.check_kind(params, model, config.model)
        params = model.default_params if params is None else params
        beams = params if isinstance(params, BeamSearchParams) else None
        if beams is not None:
            params = self._params_of_beams(beams, model)
        if not isinstance(params, SamplingParams | PoolingParams):
            raise UserError(f"Sampling parameters are a SamplingParams, not {type(params).__name__}.", "params")
        if isinstance(priority, bool) or not isinstance(priority, int | np.integer):
            raise UserError(f"priority must be an integer, got {priority!r}.", "priority")
        if priority and config.scheduling_policy != "priority":
            raise UserError(
                f"priority is {priority}, but scheduling_policy is {config.scheduling_policy!r}; "
                "start the engine with scheduling_policy='priority'.",
                "priority",
            )
        if isinstance(params, PoolingParams):
            return self._accept_pooled(request_id, prompt, params, int(priority))
        validate_for_model(params, model.vocab_size, config.max_logprobs, model.eos_ids, self._extras.processors)
        if params.stop and config.skip_tokenizer_init:
            raise UserError("stop needs the text, and skip_tokenizer_init left it out: use stop_token_ids.", "stop")
        bad_words = read_bad_words(params.bad_words, model.tokenizer)
        check_allows_a_token(params, bad_words, model.eos_ids)
        text, ids, salt = read_prompt(prompt, params, model.tokenizer, model.vocab_size, model.max_model_len)
        if len(ids) + params.min_tokens > model.max_model_len:
            raise too_long(model.max_model_len, len(ids), params.min_tokens)
        accepted = Accepted(
            request_id=request_id,
            internal_id=request_id,
            prompt=text,
            prompt_token_ids=tuple(ids),
            params=params,
            priority=int(priority),
            salt=salt,
            bad_words=bad_words,
            grammar=self._grammar(params, language),
            adapter=adapter,
            beams=beams,
            num_sequences=params.n if beams is None else beams.beam_width,
            name=request_id,
        )
        width = 1 if beams is None else beams.beam_width
        scheduler.check_fits(self._limits, len(ids), accepted.limit(model.max_model_len), width)
        return accepted

    def _params_of_beams(self, beams: BeamSearchParams, model: ModelInfo) -> SamplingParams:
        """Refuse a search that is too wide; return the parameters of each of its beams.

        What the device samples for it means nothing: the likeliest tokens are what counts.
        """
        if self._config.speculative_config is not None:
            raise UserError(
                "beam search is not supported with speculative_config; leave one of them out.", "beam_width"
            )
        num_stops, width = 0 if beams.ignore_eos else len(model.eos_ids), beams.beam_width
        needed = num_needed(width, num_stops)
        most = min(self._num_logprobs - num_stops, self._limits.num_slots)
        if needed > self._num_logprobs or width > self._limits.num_slots:
            message = (
                f"beam_width may be at most {max(most, 0)} here, got {width}: a step reports {self._num_logprobs} "
                f"tokens of a beam (max_logprobs), of which {num_stops} may end it, and the beams of a search run "
                f"together in {self._limits.num_slots} slots (max_num_seqs)."
            )
            raise UserError(message, "beam_width", width)
        return SamplingParams(
            temperature=0.0,
            max_tokens=beams.max_tokens,
            ignore_eos=beams.ignore_eos,
            skip_special_tokens=beams.skip_special_tokens,
            logprobs=needed,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _accept_pooled(self, request_id: str, prompt: Prompt, params: PoolingParams, priority: int) -> Accepted:
        """Check a prompt that is to be pooled."""
        read = pooled_input.read(prompt, params, self._model)
        scheduler.check_fits(self._limits, len(read.token_ids), len(read.token_ids))
        return Accepted(
            request_id=request_id,
            internal_id=request_id,
            prompt=read.text,
            prompt_token_ids=read.token_ids,
            params=pooled_input.SAMPLING,
            priority=priority,
            salt=read.salt,
            pooling=params,
            token_types=read.token_types,
            name=request_id,
        )

    def _grammar(self, params: SamplingParams, language: Language) -> Grammar | None:
        """Compile what an output must look like, if anything is asked."""
        asked = params.structured_outputs
        if asked is None:
            return None
        if self._config.skip_tokenizer_init:
            message = "structured_outputs needs the tokenizer, and skip_tokenizer_init left it out."
            raise UserError(message, "structured_outputs")
        if not language.model.eos_ids:
            message = "structured_outputs needs a token that ends an output, and this model has none."
            raise UserError(message, "structured_outputs")
        return language.grammars.compile(asked)

    def make_group(self, accepted: Accepted, now: float) -> tuple[SequenceGroup, list[Request]]:
        """Make a request's sequences, and what the scheduler needs of each."""
        params, ids = accepted.params, accepted.prompt_token_ids
        group = SequenceGroup(
            request_id=accepted.request_id,
            internal_id=accepted.internal_id,
            prompt=accepted.prompt,
            prompt_token_ids=ids,
            metrics=RequestMetrics(arrival_time=now),
            kind=params.output_kind,
            tokenizer=self._model_of(accepted.adapter).tokenizer,
            adapter=accepted.adapter,
            num_prompt_logprobs=params.prompt_logprobs,
        )
        if accepted.beams is not None:
            group.search = BeamSearch(self._rules(accepted, accepted.beams))
            group.shows_stop = accepted.beams.include_stop_str_in_output
        root, matcher = self._root(accepted), StopMatcher.of(params.stop)
        num_sequences, first = accepted.num_sequences, self._num_sequences + 1
        requests = []
        for index in range(num_sequences):
            own = self._make_sequence(group, index, params, matcher, accepted.grammar)
            own.pooling = accepted.pooling
            if accepted.token_types is not None:
                own.token_types = np.asarray(accepted.token_types, np.int32)
            group.sequences.append(own)
            # The first sequence computes the whole prompt if its log-probabilities are wanted.
            reads_cache = params.prompt_logprobs is None or index > 0
            if self._model.pooler is not None:
                reads_cache = self._model.pooler.pooling == "last"  # a mean needs the hidden states of all tokens
            requests.append(
                Request(
                    sequence_id=own.sequence_id,
                    tokens=own.tokens,
                    num_prompt=len(ids),
                    limit=accepted.limit(self._model.max_model_len),
                    stop_ids=tuple(own.eos_ids) + tuple(set(params.stop_token_ids) - own.eos_ids),
                    priority=accepted.priority,
                    adapter=0 if accepted.adapter is None else accepted.adapter.number,
                    # Masks come after the token before, and whole log-probabilities of one place of a row.
                    may_draft=accepted.grammar is None and 0 <= (params.logprobs or 0) <= MOST_LOGPROBS,
                    root=root,
                    reads_cache=reads_cache and not params.skip_reading_prefix_cache,
                    gang=0 if accepted.beams is None else first,
                    name=f"{accepted.name}[{index}]" if num_sequences > 1 else accepted.name,
                )
            )
        return group, requests

    def _rules(self, accepted: Accepted, beams: BeamSearchParams) -> Rules:
        model = self._model_of(accepted.adapter)
        return Rules(
            width=beams.beam_width,
            most_tokens=accepted.limit(self._model.max_model_len) - len(accepted.prompt_token_ids),
            stop_ids=frozenset() if beams.ignore_eos else model.eos_ids,
            length_penalty=beams.length_penalty,
            early_stopping=beams.early_stopping,
        )

    def _root(self, accepted: Accepted) -> bytes | None:
        """Return what a request's blocks depend on beside its tokens; None if they are not to be shared."""
        if self._limits.whole_prompts:  # there is no cache
            return None
        if self._config.enable_prefix_caching:
            return content_root(accepted.salt, b"" if accepted.adapter is None else accepted.adapter.digest)
        # The n sequences of a prompt still share its blocks, under a root that no other request has.
        is_shared = accepted.num_sequences > 1 or accepted.beams is not None
        return content_root(f"{self._num_sequences}".encode()) if is_shared else None

    def pack(self, accepted: Accepted, group: SequenceGroup) -> None:
        """Choose the seeds of a request's sequences and pack their sampling parameters for the device.

        Apart from `make_group`, so that a request that could not be made changes no seed of those after it.
        """
        params, extras = accepted.params, self._extras
        if accepted.pooling is not None:
            group.sequences[0].row = pooled_input.ROW
            return
        if accepted.grammar is not None:
            params = replace(params, min_tokens=0)  # its masks see to that, see constrained_rows.py
        seed = params.seed
        if seed is None:
            # A drawn seed makes equal requests differ by the order in which they came.
            seed = self._config.seed if self._config.deterministic else int(self._random.integers(2**63))
        num_prompt, num_bad = len(group.prompt_token_ids), sum(map(len, accepted.bad_words))
        for own in group.sequences:
            own.seed = (seed + own.index) % 2**64
            stop_ids = own.eos_ids | set(params.stop_token_ids)
            own.row = sampler.pack_row(
                params, own.seed, num_prompt, stop_ids, self._model.vocab_size, num_bad, extras.bits(params)
            )
            own.extras = extras.pack(params, accepted.bad_words)

    def _model_of(self, adapter: Adapter | None) -> ModelInfo:
        """Return the model as the requests of an adapter see it."""
        return self._model if adapter is None else adapter.language.model

    def _make_sequence(
        self, group: SequenceGroup, index: int, params: SamplingParams, matcher: StopMatcher, grammar: Grammar | None
    ) -> sequence.Sequence:
        self._num_sequences += 1
        model, ids = self._model_of(group.adapter), group.prompt_token_ids
        is_reported = params.logprobs is not None or params.logprob_token_ids is not None
        return sequence.Sequence(
            sequence_id=self._num_sequences,
            group=group,
            index=index,
            params=params,
            # With `ignore_eos` a grammar's masks allow an end only where nothing else may follow.
            eos_ids=frozenset() if params.ignore_eos and grammar is None else model.eos_ids,
            variant=sampler.needs(params),
            tokens=array("i", ids),
            detokenizer=detokenizer.begin(model.tokenizer, ids, params.skip_special_tokens),
            matcher=matcher,
            stop_tokens=stop_tokens_of(params, model.tokenizer),
            repetition=RepetitionDetector(params.repetition_detection) if params.repetition_detection else None,
            constraint=None if grammar is None else grammar.begin(),
            logprobs=[] if group.search is None and is_reported else None,
        )


def stop_tokens_of(params: SamplingParams, tokenizer: Tokenizer) -> dict[int, str]:
    """Return the special tokens that are stop strings, which a text without special tokens would never show."""
    if not params.stop or not params.skip_special_tokens:
        return {}
    found = {tokenizer.token_id(stop): stop for stop in params.stop if tokenizer.is_special(stop)}
    return {token: stop for token, stop in found.items() if token is not None}


def read_prompt(
    prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer, vocab_size: int, max_model_len: int
) -> tuple[str | None, list[int], bytes]:
    """Return a prompt's text, its checked token ids and its cache salt; what is wrong with it is a UserError.

    `prompt` is text, token ids, or a mapping with "prompt" or "prompt_token_ids" and perhaps "cache_salt". One that
    leaves no room for a token in `max_model_len` is refused, unless `truncate_prompt_tokens` cuts it.
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
    """Return what of a prompt's text is to be tokenized: all of it, or where `truncate_prompt_tokens` cuts, its end.

    Cheap, unlike to tokenize what is not needed: 8 MiB to keep 8 tokens of took 5 s. A text that must be longer than
    the context is a ContextLengthError; `Tokenizer.end_of` says when a cut could be seen in the tokens.
    """
    kept = num_kept(params, max_model_len)
    if kept is not None:
        return tokenizer.end_of(text, kept)
    tokenizer.check_length(text, max_model_len)
    return text


def num_kept(params: SamplingParams, max_model_len: int) -> int | None:
    """Return how many of a prompt's tokens stay, the last ones; None for all. More than the context are refused."""
    asked = params.truncate_prompt_tokens
    if asked is not None and asked > max_model_len:
        message = f"truncate_prompt_tokens value ({asked}) is greater than max_model_len ({max_model_len})."
        raise UserError(f"{message} Please select a smaller truncation size.", "truncate_prompt_tokens", asked)
    if asked != -1:
        return asked
    return max(1, max_model_len - (params.max_tokens or 1))


def read_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that words must not become: each without and with a space before it.

    Unlike vLLM's, which drops the second where it has another number of tokens and so lets such a word through.
    """
    most = MAX_BAD_WORD_TOKENS
    names = {word.lstrip(" ") for word in words}
    sequences: tuple[tuple[int, ...], ...] | None = None
    if len(names) <= most and sum(map(len, names)) <= most * _BAD_WORD_CHARACTERS:  # before the time is spent
        texts = [text for name in sorted(names) for text in (name, " " + name)]
        spelled = dict.fromkeys(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        # One that ends with another cannot come where that one does not.
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
    """Refuse parameters that forbid each of the allowed tokens already as the first one."""
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
