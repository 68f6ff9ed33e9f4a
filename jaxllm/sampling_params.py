"""`SamplingParams`: a request's parameters, with vLLM's names, defaults, rules and messages. Standard library only."""

from __future__ import annotations

import difflib
import numbers
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, fields
from enum import IntEnum
from functools import partial
from typing import Any, Self

from jaxllm import checks, sampling_fields
from jaxllm.errors import UnsupportedError, UserError
from jaxllm.request_params import RequestParams
from jaxllm.sampling_fields import (
    MODEL,
    Rule,
    at_least,
    at_most,
    declaration_of,
    declared,
    declared_number,
    names_in,
    within,
)
from jaxllm.structured_outputs_params import StructuredOutputsParams, read_structured_outputs

MAX_MASKED_STOP_IDS = 32  # of min_tokens; a width of the sampling state, as the next four
MAX_BIASED_TOKENS = 300  # of logit_bias, OpenAI's limit
MAX_BAD_WORD_TOKENS = 512  # of all bad_words, also with a leading space
MAX_REPORTED_TOKENS = 128  # logprob_token_ids, vLLM's limit
MAX_PROCESSOR_ARGUMENTS = 8
MAX_PROCESSORS = 31  # per engine: bits of a non-negative int32
MAX_PATTERN_SIZE = 1024  # tokens, of repetition_detection
_GREEDY_BELOW = 1e-5  # greedy, as in vLLM
_LEAST_TEMPERATURE = 0.01  # if not greedy: smaller divisors overflow logits
_MOST_SEQUENCES = 16384  # vLLM's default limit of n
_MOST_NAMED = 8


class RequestOutputKind(IntEnum):
    """Contents of each output of a stream."""

    CUMULATIVE = 0
    DELTA = 1  # new tokens
    FINAL_ONLY = 2  # at the end


@dataclass(frozen=True)
class RepetitionDetectionParams:
    """Criteria for repetitive output: it ends in `min_count` copies of one pattern of tokens."""

    max_pattern_size: int = 0  # 0 disables
    min_pattern_size: int = 0  # 0 means 1
    min_count: int = 0  # at least 2

    def __post_init__(self) -> None:
        for own in fields(self):
            object.__setattr__(self, own.name, checks.integer("repetition_detection", getattr(self, own.name)))
        if not 0 <= self.min_pattern_size <= self.max_pattern_size:
            raise UserError(
                "max_pattern_size, min_pattern_size must be >=0, with min_pattern_size <= max_pattern_size",
                "repetition_detection",
            )
        if self.max_pattern_size > MAX_PATTERN_SIZE:
            raise UserError(
                f"max_pattern_size must be at most {MAX_PATTERN_SIZE}, got {self.max_pattern_size}.",
                "repetition_detection",
            )
        if self.max_pattern_size > 0 and self.min_count < 2:
            raise UserError(
                "min_count must be >= 2 to detect repetitive patterns in engine output. If you do not wish to detect "
                "repetitive patterns, set max_pattern_size to 0.",
                "repetition_detection",
            )


def _top_k(name: str, value: object) -> int:
    found = checks.integer(name, value)
    return 0 if found == -1 else found


def _optional_integer(name: str, value: object) -> int | None:
    return None if value is None else checks.integer(name, value)


def _structured_outputs(name: str, value: object) -> StructuredOutputsParams | None:
    return read_structured_outputs(value)


def _extra_args(name: str, value: object) -> dict[str, tuple[float, ...]] | None:
    if not isinstance(value, Mapping):
        message = f"extra_args must map names of logits processors to numbers, got {checks.shown(value)}."
        raise UserError(message, "extra_args", value)
    if len(value) > MAX_PROCESSORS:
        message = f"extra_args must name at most {MAX_PROCESSORS} logits processors, got {len(value)}."
        raise UserError(message, "extra_args", len(value))
    arguments: dict[str, tuple[float, ...]] = {}
    for processor, given in value.items():
        if not isinstance(processor, str):
            raise UserError(f"extra_args must have names for keys, got {checks.shown(processor)}.", name, processor)
        given = given if isinstance(given, list | tuple) else (given,)
        if len(given) > MAX_PROCESSOR_ARGUMENTS:
            message = (
                f"extra_args may give a logits processor at most {MAX_PROCESSOR_ARGUMENTS} numbers, got {len(given)}."
            )
            raise UserError(message, "extra_args", len(given))
        arguments[processor] = tuple(checks.number(name, number) for number in given)
    return arguments or None


def _repetition_detection(name: str, value: object) -> RepetitionDetectionParams | None:
    if isinstance(value, Mapping):
        known = [own.name for own in fields(RepetitionDetectionParams)]
        for key in value:
            if key not in known:
                message = f"repetition_detection has no {checks.shown(key)}; it has {', '.join(known)}."
                raise UserError(message, "repetition_detection", value)
        value = RepetitionDetectionParams(**value)
    if value is not None and not isinstance(value, RepetitionDetectionParams):
        message = f"repetition_detection must be a RepetitionDetectionParams, got {checks.shown(value)}."
        raise UserError(message, "repetition_detection", value)
    return value if value is not None and value.max_pattern_size > 0 else None


def _output_kind(name: str, value: object) -> RequestOutputKind:
    try:
        return RequestOutputKind(checks.integer(name, value))
    except ValueError as error:
        raise UserError(
            f"output_kind must be one of RequestOutputKind, got {checks.shown(value)}.", "output_kind", value
        ) from error


def _check_biased(bias: Mapping[object, object]) -> None:
    wrong = [
        token
        for token in bias
        if isinstance(token, bool)
        or not (re.fullmatch(r"[0-9]{1,10}", token) if isinstance(token, str) else isinstance(token, numbers.Integral))
    ]
    if wrong:
        more = f" and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        shown = ", ".join(map(checks.shown, wrong[:_MOST_NAMED]))
        raise UserError(f"logit_bias must name tokens by their ids, got {shown}{more}.", "logit_bias", wrong[0])


def _logit_bias(name: str, value: object) -> dict[int, float] | None:
    if not isinstance(value, Mapping):
        raise UserError(f"logit_bias must map token ids to numbers, got {checks.shown(value)}.", "logit_bias", value)
    if len(value) > MAX_BIASED_TOKENS:
        raise UserError(
            f"logit_bias must name at most {MAX_BIASED_TOKENS} tokens, got {len(value)}.", "logit_bias", len(value)
        )
    _check_biased(value)
    bias: dict[int, float] = {}
    for token, number in value.items():
        token = checks.integer("logit_bias", int(token) if isinstance(token, str) else token)
        if token in bias:
            raise UserError(f"logit_bias must name a token once, got {token} twice.", "logit_bias", token)
        # Clamped as in vLLM to OpenAI's range, where 100 means "always".
        bias[token] = min(100.0, max(-100.0, checks.number("logit_bias", number)))
    return bias or None


@dataclass(frozen=True, kw_only=True)
class SamplingParams(RequestParams):
    """Sampling and stopping parameters of a request; invalid ones raise `UserError`.

    Unsupported vLLM parameters are accepted at their defaults.
    """

    n: int = declared(
        1, "outputs per prompt", read=checks.integer, rules=(at_least(1), at_most(_MOST_SEQUENCES)), grpc="sampling."
    )
    presence_penalty: float = declared_number(
        0.0, "subtracted from the logit of a token that the output contains", rules=(within(-2, 2),)
    )
    frequency_penalty: float = declared_number(
        0.0, "subtracted from the logit of a token for each occurrence in the output", rules=(within(-2, 2),)
    )
    repetition_penalty: float = declared_number(
        1.0,
        "divides positive and multiplies negative logits of tokens that the prompt or the output contains",
        rules=(Rule(lambda value, _: value > 0.0, "must be greater than zero"),),
        ollama="repeat_penalty",
    )
    temperature: float = declared_number(
        1.0,
        "0: always the most likely token; top_p, top_k and min_p then have no effect",
        rules=(at_least(0.0, "must be non-negative"),),
        anthropic="",
    )
    top_p: float = declared_number(
        1.0,
        "sample from the most likely tokens whose probabilities add up to this",
        rules=(Rule(lambda value, _: 0.0 < value <= 1.0, "must be in (0, 1]"),),
        anthropic="",
    )
    top_k: int = declared_number(
        0,
        "sample from this many most likely tokens; 0 or -1: all",
        rules=(at_least(0, "must be 0 (disable), or at least 1"),),
        anthropic="",
        read=_top_k,
    )
    min_p: float = declared_number(
        0.0,
        "minimum probability of a token, as a share of the most likely token's",
        rules=(within(0, 1),),
        anthropic="",
    )
    seed: int | None = declared(
        None,
        "seed of 64 bits, for a reproducible output; none or -1: the engine draws one",
        read=sampling_fields.seed,
        anthropic="",
        ollama="",
        grpc="sampling.",
    )
    stop: Sequence[str] = declared(
        (),
        "text that ends the output; may be repeated",
        "TEXT",
        read=sampling_fields.text_or_texts,
        given="str | Sequence[str]",
        ollama="",
        grpc="stop.stop_strings",
    )
    stop_token_ids: Sequence[int] = declared(
        (), "token id that ends the output; may be repeated", "ID", read=sampling_fields.ids, grpc="stop."
    )
    ignore_eos: bool = declared(False, "continue after the end-of-sequence token", read=checks.flag, grpc="stop.")
    max_tokens: int | None = declared(
        16,
        "maximum tokens of an output; none: until the context is full",
        "TOKENS",
        read=_optional_integer,
        rules=(at_least(1),),
        ollama="num_predict",
        grpc="stop.",
        model="max_new_tokens",
    )
    min_tokens: int = declared(
        0,
        "tokens before which neither end-of-sequence nor stop_token_ids can be sampled",
        "TOKENS",
        read=checks.integer,
        rules=(
            at_least(0, "must be greater than or equal to 0"),
            Rule(
                lambda value, all_: all_["max_tokens"] is None or value <= all_["max_tokens"],
                "must be less than or equal to max_tokens={max_tokens}",
            ),
        ),
        grpc="stop.",
    )
    logprobs: int | None = declared(
        None,
        "most likely tokens to report for each token (with --json); -1: all",
        read=sampling_fields.count,
        rules=(at_least(-1, "must be non-negative or -1"),),
        openai=None,
        grpc="output.",
    )
    prompt_logprobs: int | None = declared(
        None,
        "most likely tokens to report for each token of the prompt (with --json); -1: all",
        read=sampling_fields.count,
        rules=(at_least(-1, "must be non-negative or -1"),),
        grpc="output.",
    )
    # Reported at every position, besides the sampled and likeliest tokens.
    logprob_token_ids: Sequence[int] | None = declared(
        None,
        "token id whose log-probability to report for each token (with --json); may be repeated",
        "ID",
        read=partial(sampling_fields.ids, most=MAX_REPORTED_TOKENS),
        grpc="output.",
    )
    skip_special_tokens: bool = declared(
        True, "omit special tokens from the text", read=checks.flag, grpc="output.", model=""
    )
    spaces_between_special_tokens: bool = declared(
        True,
        "keep the space that some decoders write between neighbouring added tokens, where special ones are shown",
        read=checks.flag,
        grpc="output.",
    )
    include_stop_str_in_output: bool = declared(
        False, "keep the stop string that ended the output in the text", read=checks.flag, grpc="stop.include_stop"
    )
    detokenize: bool = declared(True, read=checks.flag, openai=None, grpc="output.text")  # False: ids only
    # Added to logits, clamped to [-100, 100]; stored as a new dict, {} as None. Keys may be strings, as in JSON. Not
    # hashed.
    logit_bias: Mapping[int, float] | None = declared(None, read=_logit_bias, grpc="sampling.", hash=False)
    allowed_token_ids: Sequence[int] | None = declared(
        None,
        "only token id that may be sampled; may be repeated",
        "ID",
        read=sampling_fields.ids,
        grpc="sampling.",
    )
    # Banned texts, with and without a leading space; None is stored as ().
    bad_words: Sequence[str] = declared(
        (),
        "text that the output must not contain, with or without a space before it; may be repeated",
        "TEXT",
        read=partial(sampling_fields.texts, most=MAX_BAD_WORD_TOKENS),
        grpc="sampling.",
    )
    # Arguments of logits processors by name; a number is a list of one. Not hashed.
    extra_args: Mapping[str, Sequence[float] | float] | None = declared(
        None, read=_extra_args, openai=None, grpc="sampling.", hash=False
    )
    repetition_detection: RepetitionDetectionParams | None = declared(
        None,
        read=_repetition_detection,
        given="RepetitionDetectionParams | Mapping[str, int]",
        grpc="stop.",
    )
    structured_outputs: StructuredOutputsParams | None = declared(
        None,
        read=_structured_outputs,
        given="StructuredOutputsParams | Mapping[str, Any] | type",
        openai=None,
        grpc="structured_output",
    )
    truncate_prompt_tokens: int | None = declared(
        None,
        "keep only this many tokens at the prompt's end; -1: as many as fit into the context",
        read=_optional_integer,
        rules=(
            Rule(
                lambda value, _: value is None or value == -1 or value >= 1,
                "must be -1 (the model's length), or at least 1",
            ),
        ),
        grpc="stop.",
    )
    skip_reading_prefix_cache: bool | None = declared(
        None,
        "compute the whole prompt even if it is cached (default: with prompt_logprobs only)",
        read=checks.flag,
        grpc="sampling.",
    )
    output_kind: RequestOutputKind = declared(RequestOutputKind.CUMULATIVE, read=_output_kind, openai=None)
    # Tokens between a stream's outputs; None: the engine's choice.
    stream_interval: int | None = declared(
        None, read=_optional_integer, rules=(at_least(1),), grpc="stream.interval_tokens"
    )

    # Unsupported; `__post_init__` receives them in this order. Declared ones are fields of OpenAI bodies.
    prompt_logprob_token_ids: InitVar[Sequence[int] | None] = None
    prompt_logprob_start: InitVar[int | None] = None
    flat_logprobs: InitVar[bool] = False
    thinking_token_budget: InitVar[int | None] = declared(None, read=_optional_integer)
    routed_experts_prompt_start: InitVar[int] = 0
    trace_decode_token_ids: InitVar[Sequence[int] | None] = None

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        if args:
            raise UserError("SamplingParams takes keyword arguments only, as in SamplingParams(temperature=0.8).")
        for name in kwargs:
            if name not in cls.__dataclass_fields__:
                near = difflib.get_close_matches(name, cls.__dataclass_fields__, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise UserError(f"{checks.shown(name)} is not a sampling parameter of jaxllm.{hint}", name)
        return super().__new__(cls)

    @property
    def num_sequences(self) -> int:
        return self.n

    def __post_init__(self, *unbuilt: object) -> None:
        built = {own.name for own in fields(self)}
        names = [name for name in type(self).__dataclass_fields__ if name not in built]
        for name, value in zip(names, unbuilt, strict=True):
            default = getattr(type(self), name)
            if type(value) is not type(default) or value != default:
                shown = f"{name}={value}" if isinstance(value, bool) else name
                raise UnsupportedError(f"{shown} is not supported by jaxllm yet.", name, value)
        values = _normalized({name: getattr(self, name) for name in built})
        _check_ranges(values)
        if values["temperature"] < _GREEDY_BELOW:
            values |= {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
            if values["n"] > 1:
                raise UserError(f"n must be 1 when using greedy sampling, got {values['n']}.", "n", values["n"])
        elif values["temperature"] < _LEAST_TEMPERATURE:
            warnings.warn(  # no value: Python stores every distinct warning
                f"temperature is less than {_LEAST_TEMPERATURE} and was raised to it; use 0 for greedy sampling.",
                stacklevel=3,
            )
            values["temperature"] = _LEAST_TEMPERATURE
        for name, value in values.items():
            object.__setattr__(self, name, value)


def validate_for_model(
    params: SamplingParams,
    vocab_size: int,
    max_logprobs: int,
    eos_token_ids: Collection[int] = (),
    processors: Collection[str] = (),
) -> None:
    """Refuse ids outside the vocabulary, other logits processors, too many log-probabilities or stop ids.

    `max_logprobs` -1 is unlimited. `min_tokens` also masks `eos_token_ids`.
    """
    most = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
    for name, kind, count in (
        ("logprobs", "sample", params.logprobs),
        ("prompt_logprobs", "prompt", params.prompt_logprobs),
    ):
        if count == -1 and most < vocab_size:
            message = (
                f"{name}=-1 requests the whole vocabulary ({vocab_size}), but max_logprobs is {max_logprobs}: "
                f"request at most {most}, or start the engine with max_logprobs=-1 (--max-logprobs -1)."
            )
            raise UserError(message, name, count)
        if count is not None and count > most:
            message = f"Requested {kind} logprobs of {count}, which is greater than max allowed: {most}"
            raise UserError(message, name, count)
    for asked in params.extra_args or ():
        if asked not in processors:
            has = f"it has {', '.join(processors)}" if processors else "it has none"
            message = f"extra_args: {checks.shown(asked)} is not a logits processor of this engine; {has}."
            raise UserError(message, "extra_args", asked)
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
        ids = getattr(params, name) or ()
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise UserError(
                f"token_id(s) {checks.shown(outside)} in {name} contain out-of-vocab token ids. "
                f"Vocabulary size: {vocab_size}",
                name,
                outside,
            )
    num_masked = len({*params.stop_token_ids, *eos_token_ids})
    if params.min_tokens > 0 and num_masked > MAX_MASKED_STOP_IDS:
        raise UserError(
            f"min_tokens can hold back at most {MAX_MASKED_STOP_IDS} stop ids, got {num_masked} "
            "(including end-of-sequence ids): shorten stop_token_ids or drop min_tokens.",
            "stop_token_ids",
            params.stop_token_ids,
        )


def default_sampling_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Return default parameters from a model's `generation_config.json`.

    `do_sample` is ignored, as in vLLM: without a temperature, 1.0 applies.
    """
    names = names_in(SamplingParams, MODEL)
    given = {names[key]: value for key, value in generation_config.items() if key in names and value is not None}
    try:
        return SamplingParams(**given)
    except UserError as error:
        raise UserError(f"generation_config.json: {error}", error.parameter, error.value) from error


# Name, declaration, whether None is accepted.
_DECLARED = [(own.name, declaration_of(own), own.default is None) for own in fields(SamplingParams)]
_RULES = [(name, rule) for name, own, _ in _DECLARED for rule in own.rules]


def _normalized(given: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if is_optional and given[name] is None else declaration.read(name, given[name])
        for name, declaration, is_optional in _DECLARED
    }


def _check_ranges(values: dict[str, Any]) -> None:
    """Refuse values out of range, with vLLM's messages in vLLM's order."""
    for name, rule in _RULES:
        if not rule.holds(values[name], values):
            raise UserError(f"{name} {rule.text.format_map(values)}, got {values[name]}.", name, values[name])
    if values["stop"] and not values["detokenize"]:
        raise UserError("stop needs the text: set detokenize=True, or use stop_token_ids.", "stop", values["stop"])
    if "" in values["stop"]:
        raise UserError("stop cannot contain an empty string.", "stop", values["stop"])
    if any(not word.lstrip(" ") for word in values["bad_words"]):
        raise UserError("bad_words cannot contain an empty string.", "bad_words", values["bad_words"])
    if values["allowed_token_ids"] == ():
        raise UserError("allowed_token_ids is not None and empty!", "allowed_token_ids", ())
    if values["logprob_token_ids"] == ():
        raise UserError("logprob_token_ids must not be empty.", "logprob_token_ids", ())
