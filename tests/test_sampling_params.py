"""Sampling parameters: accepted values, values refused with vLLM's messages, and no ignored ones."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import subprocess
import sys
import warnings
from types import MappingProxyType

import numpy as np
import pytest

from jaxllm import sampling_fields, sampling_params
from jaxllm.errors import UserError
from jaxllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxllm.sampling_fields import MAX_IDS
from jaxllm.sampling_params import (
    MAX_MASKED_STOP_IDS,
    MAX_PROCESSORS,
    RequestOutputKind,
    SamplingParams,
    default_sampling_params,
    validate_for_model,
)
from tests.support.naive import Unread

HUGE = 10**5000  # CPython refuses to print it


def refusal(**arguments: object) -> str:
    with pytest.raises(UserError) as caught:
        SamplingParams(**arguments)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300
    return message


def test_defaults_are_those_of_vllm():
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "logprob_token_ids": None,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "detokenize": True,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": (),
        "extra_args": None,
        "repetition_detection": None,
        "structured_outputs": None,
        "truncate_prompt_tokens": None,
        "skip_reading_prefix_cache": None,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "stream_interval": None,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n must be at least 1, got 0."),
        ({"n": 16385}, "n must be at most 16384, got 16385."),
        ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling, got 2."),
        ({"n": 2, "temperature": 1e-6}, "n must be 1 when using greedy sampling, got 2."),
        ({"presence_penalty": 2.1}, "presence_penalty must be in [-2, 2], got 2.1."),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be in [-2, 2], got -2.1."),
        ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0.0."),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be a finite number, got inf."),
        ({"temperature": -1}, "temperature must be non-negative, got -1.0."),
        ({"temperature": math.nan}, "temperature must be a finite number, got nan."),
        ({"temperature": HUGE}, "temperature must be a finite number, got inf."),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0.0."),
        ({"top_p": 1.01}, "top_p must be in (0, 1], got 1.01."),
        ({"top_k": -2}, "top_k must be 0 (disable), or at least 1, got -2."),
        ({"min_p": 1.5}, "min_p must be in [0, 1], got 1.5."),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
        ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1."),
        ({"min_tokens": 17}, "min_tokens must be less than or equal to max_tokens=16, got 17."),
        ({"logprobs": -2}, "logprobs must be non-negative or -1, got -2."),
        ({"prompt_logprobs": -2}, "prompt_logprobs must be non-negative or -1, got -2."),
        ({"allowed_token_ids": []}, "allowed_token_ids is not None and empty!"),
        ({"bad_words": ["a", ""]}, "bad_words cannot contain an empty string."),
        ({"bad_words": "a"}, "bad_words must be a list of strings, got 'a'."),
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids must hold at most 128 integers, got 129."),
        ({"extra_args": {"a": [1] * 9}}, "extra_args may give a logits processor at most 8 numbers, got 9."),
        ({"extra_args": {"a": "1"}}, "extra_args must be a number, got '1'."),
        ({"stop": ""}, "stop cannot contain an empty string."),
        ({"stop": ["a", ""]}, "stop cannot contain an empty string."),
        ({"stop": [1]}, "stop must contain only strings, got [1]."),
        ({"stop_token_ids": ["1"]}, "stop_token_ids must contain only integers, got ['1']."),
        ({"stop_token_ids": [True]}, "stop_token_ids must contain only integers, got [True]."),
        ({"stop": "x", "detokenize": False}, "stop needs the text: set detokenize=True, or use stop_token_ids."),
        (
            {"truncate_prompt_tokens": 0},
            "truncate_prompt_tokens must be -1 (the model's length), or at least 1, got 0.",
        ),
        (
            {"truncate_prompt_tokens": -2},
            "truncate_prompt_tokens must be -1 (the model's length), or at least 1, got -2.",
        ),
        ({"stream_interval": 0}, "stream_interval must be at least 1, got 0."),
        ({"output_kind": 3}, "output_kind must be one of RequestOutputKind, got 3."),
        ({"output_kind": None}, "output_kind must be one of RequestOutputKind, got None."),
        ({"logit_bias": [(1, 2.0)]}, "logit_bias must map token ids to numbers, got [(1, 2.0)]."),
        ({"logit_bias": {"a": 1}}, "logit_bias must name tokens by their ids, got 'a'."),
        ({"logit_bias": {"-1": 1}}, "logit_bias must name tokens by their ids, got '-1'."),
        ({"logit_bias": {True: 1}}, "logit_bias must name tokens by their ids, got True."),
        ({"logit_bias": {"a": 1, 5: 1, 1.5: 1}}, "logit_bias must name tokens by their ids, got 'a', 1.5."),
        (
            {"logit_bias": {f"x{i}": 1 for i in range(10)}},
            "logit_bias must name tokens by their ids, got 'x0', 'x1', 'x2', 'x3', 'x4', 'x5', 'x6', 'x7' and 2 more.",
        ),
        ({"logit_bias": {1: "2"}}, "logit_bias must be a number, got '2'."),
        ({"logit_bias": {1: math.inf}}, "logit_bias must be a finite number, got inf."),
        ({"logit_bias": {5: 1, "05": 2}}, "logit_bias must name a token once, got 5 twice."),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "logit_bias must name at most 300 tokens, got 301."),
    ],
)
def test_out_of_range_is_refused_in_vllms_words(arguments: dict, message: str):
    assert refusal(**arguments) == message


INTEGERS, NUMBERS, FLAGS = (
    [own.name for own in dataclasses.fields(SamplingParams) if str(own.type).removesuffix(" | None") == kind]
    for kind in ("int", "float", "bool")
)
OTHERS = ("stop", "stop_token_ids", "logit_bias", "output_kind", "allowed_token_ids", "logprob_token_ids", "bad_words")


@pytest.mark.parametrize("name", [*INTEGERS, *NUMBERS, *FLAGS, *OTHERS])
@pytest.mark.parametrize(
    "value",
    ["1", b"1", {"a": 1}, 1j, object(), "line\nbreak"],
    ids=lambda value: f"{type(value).__name__}_{value!r:.4}",
)
def test_wrong_types_are_refused_by_name(name: str, value: object):
    if name == "stop" and isinstance(value, str):
        value = 7  # a string is a stop string
    assert refusal(**{name: value}).startswith(f"{name} must ")


@pytest.mark.parametrize("name", [*INTEGERS, *NUMBERS])
def test_false_is_not_a_number(name: str):
    assert refusal(**{name: False}).startswith(f"{name} must be ")


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.0, math.nan, HUGE, -HUGE, 2**63], ids=["1.0", "nan", "huge", "-huge", "2**63"])
def test_integers_fit_the_device(name: str, value: object):
    assert refusal(**{name: value}).startswith(f"{name} must be an integer")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, np.float32("nan"), HUGE], ids=["nan", "inf", "-inf", "nan32", "huge"]
)
def test_numbers_are_finite(name: str, value: object):
    assert refusal(**{name: value}).startswith(f"{name} must be a finite number")


@pytest.mark.parametrize("value", [[HUGE], [2**31], [-(2**31) - 1]], ids=["huge", "2**31", "below"])
def test_stop_ids_fit_the_device(value: list):
    assert refusal(stop_token_ids=value).startswith("stop_token_ids must be an integer from")


UNBUILT = sorted(SamplingParams.__dataclass_fields__.keys() - {own.name for own in dataclasses.fields(SamplingParams)})


@pytest.mark.parametrize("name", UNBUILT)
def test_of_what_is_not_built_only_the_default_is_accepted(name: str):
    default = getattr(SamplingParams, name)
    assert SamplingParams(**{name: default}) == SamplingParams()
    for other in [not default] if isinstance(default, bool) else [3, [1], True]:
        shown = f"{name}={other}" if isinstance(other, bool) else name
        assert refusal(**{name: other}) == f"{shown} is not supported by jaxllm yet."


def test_unknown_names_are_refused_with_the_nearest():
    assert refusal(temprature=1.0) == (
        "'temprature' is not a sampling parameter of jaxllm. Did you mean 'temperature'?"
    )
    assert refusal(zzz=1) == "'zzz' is not a sampling parameter of jaxllm."
    with pytest.raises(UserError, match="keyword arguments"):
        SamplingParams(1)  # pyright: ignore


def test_errors_carry_parameter_and_value():
    with pytest.raises(ValueError) as caught:
        SamplingParams(top_p=2.0)
    error = caught.value
    assert isinstance(error, UserError) and (error.parameter, error.value) == ("top_p", 2.0)
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.parameter, copied.value) == (str(error), "top_p", 2.0)


def test_values_take_one_form():
    params = SamplingParams(
        top_k=np.int64(-1),
        temperature=np.float32(0.5),
        top_p=1,
        seed=-1,
        stop="end",
        stop_token_ids=[5, 3, np.int32(5)],
        logprobs=True,
    )
    assert (params.top_k, params.temperature, params.seed, params.logprobs) == (0, 0.5, None, 1)
    assert params.stop == ("end",) and params.stop_token_ids == (5, 3)
    assert type(params.temperature) is float and type(params.top_p) is float and type(params.logprobs) is int
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()  # pyright: ignore
    assert SamplingParams(stop=["end"]) == SamplingParams(stop=("end",))
    assert SamplingParams(output_kind=np.int64(1)).output_kind is RequestOutputKind.DELTA


def test_a_bias_is_a_dict_of_its_own():
    given = {7: 1, "12": np.float32(0.5), np.int64(3): 1e9, 4: -101}
    params = SamplingParams(logit_bias=given)
    assert params.logit_bias == {7: 1.0, 12: 0.5, 3: 100.0, 4: -100.0}
    assert {(type(token), type(value)) for token, value in params.logit_bias.items()} == {(int, float)}
    given[7] = 50
    assert params.logit_bias[7] == 1.0
    for nothing in (None, {}, MappingProxyType({})):
        assert (
            SamplingParams(logit_bias=nothing) == SamplingParams()
            and SamplingParams(logit_bias=nothing).logit_bias is None
        )
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(300), 1)).logit_bias) == 300


@pytest.mark.parametrize("seed", [0, -2, 2**63 - 1, -(2**63)])
def test_seeds_have_64_bits(seed: int):
    assert SamplingParams(seed=seed).seed == seed
    assert refusal(seed=2**63).startswith("seed must be an integer from -9223372036854775808 to 9223372036854775807")


def test_greedy_resets_the_filters():
    params = SamplingParams(temperature=1e-6, top_p=0.5, top_k=3, min_p=0.1, seed=7)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.0, 1.0, 0, 0.0, 7)


def test_a_tiny_temperature_is_raised_with_a_warning():
    with pytest.warns(UserWarning, match="raised to it") as record:
        params = SamplingParams(temperature=0.005)
    assert params.temperature == 0.01
    assert record[0].filename == __file__  # the caller's line, not one inside jaxllm


def test_params_are_values():
    params = SamplingParams(temperature=0.7, stop=["a"], max_tokens=None, seed=3, logit_bias={"5": 1.5})
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(dataclasses.replace(params))
    assert dataclasses.replace(params, top_k=5) == SamplingParams(
        temperature=0.7, stop=["a"], max_tokens=None, seed=3, top_k=5, logit_bias={5: 1.5}
    )
    assert params != dataclasses.replace(params, logit_bias=None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 4  # pyright: ignore
    with pytest.raises(UserError, match="top_p must be"):
        dataclasses.replace(params, top_p=3.0)
    with pytest.raises(UserError, match="prompt_logprob_start is not supported"):
        dataclasses.replace(params, prompt_logprob_start=2)
    assert "prompt_logprob_start" not in repr(params) and "seed=3" in repr(params)


ANYTHING = [
    *(None, True, False, "", "a", "1", b"1", [], [1], [-1], ["a"], [None], [[1]], {}, {"a": 1}, 1j, range(3), object()),
    *(0, 1, -1, 2, 16, 17, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), HUGE, -HUGE, [HUGE], np.int8(1)),
    *(0.0, -0.0, 0.5, 1.0, 2.0, 5e-324, 1e-6, 1e300, -1e300, math.nan, math.inf, np.float16(0.5), np.ones(2), "\ud800"),
]


@pytest.mark.parametrize("name", [*INTEGERS, *NUMBERS, *FLAGS, *OTHERS])
def test_anything_is_valid_or_a_user_error(name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in ANYTHING:
            try:
                params = SamplingParams(**{name: value})
            except UserError as error:
                named = error.parameter or ""
                assert named in (name, "min_tokens") and str(error).startswith(named) and "\n" not in str(error)
            else:
                assert SamplingParams(**dataclasses.asdict(params)) == params
                json.dumps(dataclasses.asdict(params), allow_nan=False)


def test_a_model_limits_ids_and_logprobs():
    validate_for_model(SamplingParams(stop_token_ids=[0, 99], logprobs=20), 100, 20)
    with pytest.raises(UserError) as caught:
        validate_for_model(SamplingParams(stop_token_ids=[-1, 5, 100]), 100, 20)
    assert str(caught.value) == (
        "token_id(s) [-1, 100] in stop_token_ids contain out-of-vocab token ids. Vocabulary size: 100"
    )
    with pytest.raises(UserError) as caught:
        validate_for_model(SamplingParams(logit_bias={"100": 1, 3: 2}), 100, 20)
    assert str(caught.value) == "token_id(s) [100] in logit_bias contain out-of-vocab token ids. Vocabulary size: 100"
    assert caught.value.parameter == "logit_bias"
    for logprobs, vocab_size, most in [(21, 100, 20), (11, 10, 10)]:
        with pytest.raises(UserError) as caught:
            validate_for_model(SamplingParams(logprobs=logprobs), vocab_size, 20)
        assert str(caught.value) == (
            f"Requested sample logprobs of {logprobs}, which is greater than max allowed: {most}"
        )
    with pytest.raises(UserError) as caught:
        validate_for_model(SamplingParams(prompt_logprobs=-1), 100, 20)
    assert str(caught.value) == (
        "prompt_logprobs=-1 requests the whole vocabulary (100), but max_logprobs is 20: request at most 20, or start "
        "the engine with max_logprobs=-1 (--max-logprobs -1)."
    )
    validate_for_model(SamplingParams(logprobs=-1, prompt_logprobs=-1), 100, 100)


@pytest.mark.parametrize(
    ("name", "most", "of"),
    [
        ("stop_token_ids", MAX_IDS, "integers"),
        ("allowed_token_ids", MAX_IDS, "integers"),
        ("logprob_token_ids", 128, "integers"),
        ("bad_words", 512, "strings"),
    ],
)
def test_a_list_that_is_too_long_is_not_read(name: str, most: int, of: str):
    assert refusal(**{name: Unread([1] * (most + 1))}) == f"{name} must hold at most {most} {of}, got {most + 1}."


def test_names_of_processors_that_are_too_many_are_not_read():
    class UnreadMapping(dict):
        def items(self):
            raise AssertionError("read")

    names = [f"p{number}" for number in range(MAX_PROCESSORS + 1)]
    SamplingParams(extra_args=dict.fromkeys(names[1:], 1))
    message = refusal(extra_args=UnreadMapping.fromkeys(names, 1))
    assert message == "extra_args must name at most 31 logits processors, got 32."


def test_a_long_list_of_ids_is_not_looked_at_id_by_id(monkeypatch: pytest.MonkeyPatch):
    looks = 0

    def counted(value: object, kinds: type) -> bool:
        nonlocal looks
        looks += 1
        return isinstance(value, kinds)

    for module in (sampling_fields, sampling_params):
        monkeypatch.setattr(module, "isinstance", counted, raising=False)
    ids = [*range(5000), *range(5000)]
    assert SamplingParams(allowed_token_ids=ids).allowed_token_ids == tuple(range(5000))
    assert SamplingParams(allowed_token_ids=[np.int64(5), 5, np.int8(6)]).allowed_token_ids == (5, 6)
    with pytest.raises(UserError, match="must contain only integers"):
        SamplingParams(allowed_token_ids=[*ids, True])
    assert looks < 500


def test_of_a_long_value_only_the_beginning_is_written():
    written = 0

    class Counted:
        def __repr__(self) -> str:
            nonlocal written
            written += 1
            return "it"

    for value in ([Counted()] * 5000, [[Counted()] * 5000], dict.fromkeys(range(5000), Counted())):
        assert len(refusal(temperature=value)) < 200
    assert 0 < written < 500
    for value in ([], [[]], {}, {"a": [1, {"b": None}], 2: "it's"}, (), (1,), ["a", "b"], b"c", {1}, 1j):
        assert refusal(temperature=value) == f"temperature must be a number, got {value!r}."
    assert refusal(temperature="a" * 300) == f"temperature must be a number, got '{'a' * 96}...."


def test_min_tokens_limits_the_stop_ids():
    ids = list(range(MAX_MASKED_STOP_IDS))
    validate_for_model(SamplingParams(stop_token_ids=ids, min_tokens=1), 100, 20, eos_token_ids=[0])
    validate_for_model(SamplingParams(stop_token_ids=[*ids, 50]), 100, 20, eos_token_ids=[99])
    with pytest.raises(UserError, match="min_tokens can hold back at most 32 stop ids, got 33"):
        validate_for_model(SamplingParams(stop_token_ids=ids, min_tokens=1), 100, 20, eos_token_ids=[99])


def test_generation_config_gives_defaults():
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "do_sample": False, "eos_token_id": [1, 2], "min_p": None}
    assert default_sampling_params(config) == SamplingParams(temperature=0.6, top_p=0.9, top_k=50)
    assert default_sampling_params({"max_new_tokens": 64, "repetition_penalty": 1.1, "max_length": 9}) == (
        SamplingParams(max_tokens=64, repetition_penalty=1.1)
    )
    assert default_sampling_params({}) == SamplingParams()
    with pytest.raises(UserError, match=r"^generation_config\.json: top_p must be in"):
        default_sampling_params({"top_p": 7})


def test_outputs_say_when_they_are_finished():
    output = CompletionOutput(index=0, text="", token_ids=[], logprobs=[{3: Logprob(-0.5, 1, "x")}])
    request = RequestOutput("a", None, [1], outputs=[output], metrics=RequestMetrics(arrival_time=1.0))
    assert not output.finished() and not request.finished
    output.finish_reason = "length"
    assert output.finished()
    assert RequestOutput("b", None, [1]).outputs is not RequestOutput("c", None, [1]).outputs


def test_import_needs_the_standard_library_only():
    code = "import sys; import jaxllm.sampling_params; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    printed = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert set(printed.stdout.split()) - {"jaxllm", "__main__"} <= set(sys.stdlib_module_names)


def test_a_models_own_settings_are_the_defaults_of_its_requests():
    own = {"repetition_penalty": 1.1, "presence_penalty": 1.5, "frequency_penalty": 0.5, "skip_special_tokens": False}
    own |= {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1}
    given = {**own, "max_new_tokens": 9, "do_sample": False, "eos_token_id": 2, "typical_p": None}
    assert default_sampling_params(given) == SamplingParams(**own, max_tokens=9)
