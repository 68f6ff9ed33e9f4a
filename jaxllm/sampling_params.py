"""What goes into a request besides its prompt: `SamplingParams`, its rules and its defaults.

Names, defaults, rules and messages are vLLM's where the thing exists there. Standard library only, so that a client can
import it in milliseconds. Knows no tokenizer, no model (`validate_for_model` is given its sizes) and no scheduler.
"""

from __future__ import annotations

import difflib
import numbers
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from enum import IntEnum
from typing import Any, Self

from jaxllm import checks
from jaxllm.checks import INT32_MAX
from jaxllm.errors import UnsupportedError, UserError
from jaxllm.setting import setting
from jaxllm.structured_outputs_params import StructuredOutputsParams, read_structured_outputs

MAX_MASKED_STOP_IDS = 32  # stop ids that one request can hold back with min_tokens: columns of the sampling state
MAX_BIASED_TOKENS = 300  # entries of logit_bias, OpenAI's own bound: columns of the sampling state
MAX_BAD_WORD_TOKENS = 512  # of all bad_words together, each with and without a space before it: columns as well
MAX_REPORTED_TOKENS = 128  # logprob_token_ids, vLLM's bound: columns as well
MAX_PROCESSOR_ARGUMENTS = 8  # numbers for a logits processor: columns as well
MAX_PROCESSORS = 31  # of an engine: bits of an int32 that is never negative
MAX_IDS = 2**20  # of a list of token ids, repetitions counted: several times the largest vocabularies, 0.1 s to read
MAX_PATTERN_SIZE = 1024  # tokens of a pattern that repetition_detection looks for
_GREEDY_BELOW = 1e-5  # temperatures under it mean greedy, as in vLLM
_LEAST_TEMPERATURE = 0.01  # of a request that is not greedy: logits divided by less overflow
_MOST_SEQUENCES = 16384  # vLLM's default bound of n
_MOST_NAMED = 8  # keys that an error names


class RequestOutputKind(IntEnum):
    """What each output of a stream holds."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # everything, once the request has ended


@dataclass(frozen=True)
class RepetitionDetectionParams:
    """When an output counts as repeating itself: its end is one pattern of tokens `min_count` times in a row.

    Raises:
        UserError: for a number that is no integer or out of range, or a bad combination.
    """

    max_pattern_size: int = 0  # tokens of the longest pattern; 0 looks for none
    min_pattern_size: int = 0  # tokens of the shortest one; 0 means 1
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


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends; checked when made, so a value of this type is valid.

    What vLLM has and jaxllm has not built yet is accepted with its default and otherwise refused by name.

    Raises:
        UserError: naming the parameter, for an unknown name, a wrong type, a number out of range or a bad combination.
    """

    n: int = setting(1, "outputs per prompt")
    presence_penalty: float = setting(0.0, "taken off the logit of a token that the output holds")
    frequency_penalty: float = setting(0.0, "taken off it once per occurrence")
    repetition_penalty: float = setting(
        1.0, "divides a positive, multiplies a negative logit of a token that prompt or output holds"
    )
    temperature: float = setting(1.0, "0: always the likeliest token, which resets top_p, top_k and min_p")
    top_p: float = setting(1.0, "sample from the likeliest tokens that hold this probability together")
    top_k: int = setting(0, "sample from this many likeliest tokens; 0 or -1: all")
    min_p: float = setting(0.0, "the least probability of a token, as a share of the likeliest one's")
    seed: int | None = setting(None, "64 bits, for the same output again; none or -1: the engine draws one")
    stop: Sequence[str] = setting((), "text that ends the output; may be repeated", "TEXT")
    stop_token_ids: Sequence[int] = setting((), "token id that ends the output; may be repeated", "ID")
    ignore_eos: bool = setting(False, "go on after the end-of-sequence token")
    max_tokens: int | None = setting(16, "the most tokens of an output; none: until the context is full", "TOKENS")
    min_tokens: int = setting(
        0, "tokens before which neither end-of-sequence nor stop_token_ids can be sampled", "TOKENS"
    )
    logprobs: int | None = setting(None, "likeliest tokens to report for each token (with --json); -1: all")
    prompt_logprobs: int | None = setting(None, "the same for each token of the prompt (with --json)")
    # Tokens whose log-probabilities to report at every position, beside the sampled and the likeliest ones.
    logprob_token_ids: Sequence[int] | None = setting(
        None, "token id whose log-probability to report for each token (with --json); may be repeated", "ID"
    )
    skip_special_tokens: bool = setting(True, "leave special tokens out of the text")
    include_stop_str_in_output: bool = setting(False, "let the text end with the stop string that ended it")
    detokenize: bool = True  # False: token ids only, no text
    # Added to a token's logit, clamped to [-100, 100]; stored as a dict of its own, {} as None. Keys may be text, as in
    # JSON. Left out of the hash, which a dict has none of: equal values still have equal hashes.
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = setting(
        None, "token id that may be sampled, others may not; may be repeated", "ID"
    )
    # Texts whose tokens, with and without a space before them, the output must not hold; stored as a tuple, None is ().
    bad_words: Sequence[str] = setting(
        (), "text that the output must not hold, with or without a space before it; may be repeated", "TEXT"
    )
    # Names of the engine's logits processors, each with its numbers; a lone number is one. Left out of the hash.
    extra_args: Mapping[str, Sequence[float] | float] | None = field(default=None, hash=False)
    repetition_detection: RepetitionDetectionParams | None = None  # ends an output that repeats itself; or a mapping
    structured_outputs: StructuredOutputsParams | None = None  # what the output must look like; or a mapping
    truncate_prompt_tokens: int | None = setting(
        None, "keep this many tokens of the prompt's end; -1: as many as the model holds"
    )
    skip_reading_prefix_cache: bool | None = setting(
        None, "compute the whole prompt even if it is cached (default: with prompt_logprobs only)"
    )
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None  # tokens between two outputs of a stream; None: the engine's choice

    # Not built yet; `__post_init__` gets these in this order.
    prompt_logprob_token_ids: InitVar[Sequence[int] | None] = None
    prompt_logprob_start: InitVar[int | None] = None
    flat_logprobs: InitVar[bool] = False
    spaces_between_special_tokens: InitVar[bool] = True
    thinking_token_budget: InitVar[int | None] = None
    routed_experts_prompt_start: InitVar[int] = 0
    trace_decode_token_ids: InitVar[Sequence[int] | None] = None

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Refuse names that `__init__` would answer with a TypeError, and suggest the nearest one."""
        if args:
            raise UserError("SamplingParams takes keyword arguments only, as in SamplingParams(temperature=0.8).")
        for name in kwargs:
            if name not in cls.__dataclass_fields__:
                near = difflib.get_close_matches(name, cls.__dataclass_fields__, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise UserError(f"{checks.shown(name)} is not a sampling parameter of jaxllm.{hint}", name)
        return super().__new__(cls)

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
            warnings.warn(  # without the value: Python keeps every text that it has warned with
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
    """Refuse what this model cannot serve: ids outside its vocabulary, too many log-probabilities or masked stop ids.

    `max_logprobs` -1 sets no bound. `eos_token_ids` are the model's own, which `min_tokens` holds back too;
    `processors` are the names of the engine's logits processors.
    """
    most = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
    for name, kind, count in (
        ("logprobs", "sample", params.logprobs),
        ("prompt_logprobs", "prompt", params.prompt_logprobs),
    ):
        if count == -1 and most < vocab_size:
            message = (
                f"{name}=-1 asks for the whole vocabulary ({vocab_size}), but max_logprobs is {max_logprobs}: "
                f"ask for {most} at most, or start the engine with max_logprobs=-1 (--max-logprobs -1)."
            )
            raise UserError(message, name, count)
        if count is not None and count > most:
            message = f"Requested {kind} logprobs of {count}, which is greater than max allowed: {most}"
            raise UserError(message, name, count)
    for asked in params.extra_args or ():
        if asked not in processors:
            has = f"it has {', '.join(processors)}" if processors else "it was started without any"
            message = f"extra_args: {checks.shown(asked)} is no logits processor of this engine; {has}."
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
            "(end-of-sequence ids counted): shorten stop_token_ids or drop min_tokens.",
            "stop_token_ids",
            params.stop_token_ids,
        )


def default_sampling_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Build the defaults of a model's requests from its `generation_config.json`.

    As in vLLM (`ModelConfig.get_diff_sampling_param`) `do_sample` has no say: a file without a temperature means 1.0.
    """
    own = ("repetition_penalty", "presence_penalty", "frequency_penalty", "skip_special_tokens")
    names = {name: name for name in (*own, "temperature", "top_k", "top_p", "min_p")}
    names["max_new_tokens"] = "max_tokens"
    given = {names[key]: value for key, value in generation_config.items() if key in names and value is not None}
    try:
        return SamplingParams(**given)
    except UserError as error:
        raise UserError(f"generation_config.json: {error}", error.parameter, error.value) from error


def _normalized(given: dict[str, Any]) -> dict[str, Any]:
    """Bring every value to its one type and form, or refuse it; ranges are left to `_check_ranges`."""
    values = dict(given)
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p"):
        values[name] = checks.number(name, given[name])
    for name in ("n", "top_k", "min_tokens"):
        values[name] = checks.integer(name, given[name])
    for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"):
        values[name] = checks.flag(name, given[name])
    for name in ("max_tokens", "truncate_prompt_tokens", "stream_interval"):
        if given[name] is not None:
            values[name] = checks.integer(name, given[name])
    values["output_kind"] = _output_kind(given["output_kind"])
    values["logit_bias"] = None if given["logit_bias"] is None else _logit_bias(given["logit_bias"]) or None
    for name in ("logprobs", "prompt_logprobs"):
        if given[name] is not None:
            values[name] = 1 if given[name] is True else checks.integer(name, given[name])
    if given["skip_reading_prefix_cache"] is not None:
        values["skip_reading_prefix_cache"] = checks.flag(
            "skip_reading_prefix_cache", given["skip_reading_prefix_cache"]
        )
    if given["seed"] is not None:
        seed = checks.integer("seed", given["seed"], -(2**63), 2**63 - 1)
        values["seed"] = None if seed == -1 else seed
    if values["top_k"] == -1:
        values["top_k"] = 0
    stop = (given["stop"],) if isinstance(given["stop"], str) else given["stop"]
    values["stop"] = _texts("stop", stop)
    values["bad_words"] = _texts("bad_words", given["bad_words"], MAX_BAD_WORD_TOKENS)
    values["stop_token_ids"] = _ids("stop_token_ids", given["stop_token_ids"])
    for name, most in (("allowed_token_ids", MAX_IDS), ("logprob_token_ids", MAX_REPORTED_TOKENS)):
        values[name] = None if given[name] is None else _ids(name, given[name], most)
    values["extra_args"] = None if given["extra_args"] is None else _extra_args(given["extra_args"]) or None
    values["repetition_detection"] = _repetition_detection(given["repetition_detection"])
    values["structured_outputs"] = read_structured_outputs(given["structured_outputs"])
    return values


def _texts(name: str, value: object, most: int | None = None) -> tuple[str, ...]:
    """Check a list of texts; None is an empty one."""
    texts = () if value is None else checks.sequence(name, value, "strings", most)
    if any(not isinstance(text, str) for text in texts):
        raise UserError(f"{name} must contain only strings, got {checks.shown(list(texts))}.", name, value)
    try:
        "".join(map(str, texts)).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} must be text; half of a surrogate pair is none.", name, value) from error
    return texts  # pyright: ignore[reportReturnType] - looked at above


def _ids(name: str, value: object, most: int = MAX_IDS) -> tuple[int, ...]:
    """Check a list of token ids and keep each once, in the order given; None is an empty one."""
    ids = () if value is None else checks.sequence(name, value, "integers", most)
    kinds = set(map(type, ids))  # what an abstract class says of each id takes 2 µs of it, and the ids are many
    if any(kind is bool or not issubclass(kind, numbers.Integral) for kind in kinds):
        raise UserError(f"{name} must contain only integers, got {checks.shown(list(ids))}.", name, value)
    unique: dict[int, None] = dict.fromkeys(ids if kinds <= {int} else map(int, ids))  # pyright: ignore
    if unique and not -INT32_MAX - 1 <= min(unique) <= max(unique) <= INT32_MAX:
        for token in unique:
            checks.integer(name, token)
    return tuple(unique)


def _extra_args(value: object) -> dict[str, tuple[float, ...]]:
    if not isinstance(value, Mapping):
        message = f"extra_args must map names of logits processors to numbers, got {checks.shown(value)}."
        raise UserError(message, "extra_args", value)
    if len(value) > MAX_PROCESSORS:
        message = f"extra_args must name at most {MAX_PROCESSORS} logits processors, got {len(value)}."
        raise UserError(message, "extra_args", len(value))
    arguments: dict[str, tuple[float, ...]] = {}
    for name, given in value.items():
        if not isinstance(name, str):
            raise UserError(f"extra_args must have names for keys, got {checks.shown(name)}.", "extra_args", name)
        given = given if isinstance(given, list | tuple) else (given,)
        if len(given) > MAX_PROCESSOR_ARGUMENTS:
            message = (
                f"extra_args may give a logits processor at most {MAX_PROCESSOR_ARGUMENTS} numbers, got {len(given)}."
            )
            raise UserError(message, "extra_args", len(given))
        arguments[name] = tuple(checks.number("extra_args", number) for number in given)
    return arguments


def _repetition_detection(value: object) -> RepetitionDetectionParams | None:
    """Read what may be a mapping, as in JSON; what looks for no pattern is None."""
    if isinstance(value, Mapping):
        known = [own.name for own in fields(RepetitionDetectionParams)]
        for name in value:
            if name not in known:
                message = f"repetition_detection has no {checks.shown(name)}; it has {', '.join(known)}."
                raise UserError(message, "repetition_detection", value)
        value = RepetitionDetectionParams(**value)
    if value is not None and not isinstance(value, RepetitionDetectionParams):
        message = f"repetition_detection must be a RepetitionDetectionParams, got {checks.shown(value)}."
        raise UserError(message, "repetition_detection", value)
    return value if value is not None and value.max_pattern_size > 0 else None


def _output_kind(value: object) -> RequestOutputKind:
    try:
        return RequestOutputKind(checks.integer("output_kind", value))
    except ValueError as error:
        raise UserError(
            f"output_kind must be one of RequestOutputKind, got {checks.shown(value)}.", "output_kind", value
        ) from error


def _check_biased(bias: Mapping[object, object]) -> None:
    """Refuse keys that are no token ids, all at once; JSON's keys are text."""
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


def _logit_bias(value: object) -> dict[int, float]:
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
        # Clamped as vLLM does (SamplingParams.from_optional): OpenAI's range, in which 100 means "always".
        bias[token] = min(100.0, max(-100.0, checks.number("logit_bias", number)))
    return bias


def _check_ranges(values: dict[str, Any]) -> None:
    """Refuse numbers out of range, in vLLM's words and order."""
    most = values["max_tokens"]
    rules = [
        ("n", values["n"] >= 1, "must be at least 1"),
        ("n", values["n"] <= _MOST_SEQUENCES, f"must be at most {_MOST_SEQUENCES}"),
        ("presence_penalty", -2.0 <= values["presence_penalty"] <= 2.0, "must be in [-2, 2]"),
        ("frequency_penalty", -2.0 <= values["frequency_penalty"] <= 2.0, "must be in [-2, 2]"),
        ("repetition_penalty", values["repetition_penalty"] > 0.0, "must be greater than zero"),
        ("temperature", values["temperature"] >= 0.0, "must be non-negative"),
        ("top_p", 0.0 < values["top_p"] <= 1.0, "must be in (0, 1]"),
        ("top_k", values["top_k"] >= 0, "must be 0 (disable), or at least 1"),
        ("min_p", 0.0 <= values["min_p"] <= 1.0, "must be in [0, 1]"),
        ("max_tokens", most is None or most >= 1, "must be at least 1"),
        ("min_tokens", values["min_tokens"] >= 0, "must be greater than or equal to 0"),
        (
            "min_tokens",
            most is None or values["min_tokens"] <= most,
            f"must be less than or equal to max_tokens={most}",
        ),
        *(
            (name, values[name] is None or values[name] >= -1, "must be non-negative or -1")
            for name in ("logprobs", "prompt_logprobs")
        ),
        (
            "truncate_prompt_tokens",
            values["truncate_prompt_tokens"] is None
            or values["truncate_prompt_tokens"] == -1
            or values["truncate_prompt_tokens"] >= 1,
            "must be -1 (the model's length), or at least 1",
        ),
        ("stream_interval", values["stream_interval"] is None or values["stream_interval"] >= 1, "must be at least 1"),
    ]
    for name, holds, rule in rules:
        if not holds:
            raise UserError(f"{name} {rule}, got {values[name]}.", name, values[name])
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
