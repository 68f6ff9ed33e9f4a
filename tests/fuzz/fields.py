"""Sampling fields, by the names that all three interfaces share, with valid, boundary and invalid values."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from jaxllm.sampling_params import SamplingParams

BASE: dict[str, Any] = {"prompt": "Once", "temperature": 1.0, "max_tokens": 2, "seed": 3}
_WHOLE = [0, -1, 1, 2, 3, 16, 17, 128, 511, 512, 1535, 1536, 2**31 - 1, 2**31, 2**32 + 5, 2**63 - 1, 2**63, 2**64]
_REAL = [
    *(0, -0.0, 5e-324, 1e-5, 0.5, math.nextafter(1, 0), 1, math.nextafter(1, 2), 2, math.nextafter(2, 3), 1e39, 1e308),
]
_SIGNED = [sign * value for value in (*_REAL, *_WHOLE) for sign in (1, -1)]
_WRONG: list[Any] = [True, False, "", "1", "a", [], [1], ["a"], {}, {"a": 1}]
_NUMBERS = [*_SIGNED, *_WRONG]
_FLAGS = [True, False, 0, 1, "true", [], {}]
_IDS = [
    *([], [0], [5, 5], [1535], [1536], [-1], [2**31], [2**32 + 5], [2**63], [True], ["1"], [1.0], [None]),
    *(list(range(5, 135)), 5, "5", {}),
]
_TEXTS = ["", "a", "a\0b", "\uffff", "e" + "\u0301" * 60, "x" * 64, "x" * 65, "<|im_end|>", 1, True, [], ["a"], {}]
_BY_TYPE = {"float": _NUMBERS, "int": _NUMBERS, "bool": _FLAGS, "Sequence[int]": _IDS}
_LEFT_OUT = ("detokenize", "prompt_logprobs")  # these change the compared outputs
_FIELDS = [own for own in fields(SamplingParams) if own.name not in _LEFT_OUT]

VALUES: dict[str, list[Any]] = {
    **{own.name: _BY_TYPE[kind] for own in _FIELDS if (kind := str(own.type).removesuffix(" | None")) in _BY_TYPE},
    "priority": _NUMBERS,
    "time_limit": [0, -0.0, -1, 1e-6, 0.5, 60, 10**9, 10**9 + 1, 2**64, 1e308, *_WRONG],
    # With a list of texts, only HTTP makes several prompts.
    "prompt": [*(one for one in (*_TEXTS, *_IDS) if one not in (["a"], ["1"])), [5] * 511, [5] * 512],
    "stop": [*_TEXTS, ["a", ""], ["a"] * 16, ["a"] * 17, [1], ["x" * 257]],
    "bad_words": [*_TEXTS, [" "], ["a", "b c"], ["é" * 200]],
    "logit_bias": [{}, {5: 1}, {1535: -200.5}, {1536: 1}, {-1: 1}, {"a": 1}, {5: "1"}, {5: None}, [], 5, "5"],
    "cache_salt": ["", "a", "a b", "a" * 128, "a" * 129, "é", 1, []],
    "extra_args": [{}, {"no_change": 1}, {"no_change": [1.5] * 8}, {"no_change": [1] * 9}, {"unknown": 1}, 1, "a", []],
    "structured_outputs": [
        {},
        {"regex": "a+"},
        {"regex": "("},
        {"choice": ["a", "b"]},
        {"choice": "a"},
        {"json": {"type": "integer"}, "disable_any_whitespace": True},
        {"json": "{}", "whitespace_pattern": " ?"},
        {"json": {}, "regex": "a"},
        {"json_object": True, "disable_additional_properties": True},
        {"grammar": 'start: "a"'},
        {"unknown": 1},
        1,
        "a",
        [],
    ],
    "repetition_detection": [
        *({}, {"max_pattern_size": 2, "min_count": 2}, {"max_pattern_size": 1025}, {"min": 1}, 1, []),
    ],
}
NAMES = sorted(VALUES)
