"""Regular expressions of adapters and model folders match like `re`, in time linear in the text."""

from __future__ import annotations

import random
import re
import time
from contextlib import suppress

import pytest

from jaxllm.checkpoints.lora_config import read_lora_config
from jaxllm.errors import UserError
from jaxllm.families.stored_formats import read_stored
from jaxllm.linear_expression import Expression, StepBudget

LETTERS = "abAB_.1\n "


def drawn(draws: random.Random, depth: int = 3) -> str:
    """Draw an expression from all supported syntax, and some unsupported."""
    if depth == 0 or draws.random() < 0.3:
        leaves = ["a", "b", "A", ".", r"\.", "[ab]", "[^a]", r"\w", r"\W", r"\d", r"\s", r"\b", r"\B", "_", ""]
        return draws.choice([*leaves, "^", "$", r"\A", r"\Z"])
    inner = drawn(draws, depth - 1)
    kind = draws.randrange(7)
    if kind == 0:
        return f"(?:{inner}|{drawn(draws, depth - 1)})"
    if kind == 1:
        return f"(?:{inner}){draws.choice(['*', '+', '?', '*?', '+?', '{2}', '{1,3}', '{2,}', '{0}'])}"
    if kind == 2:
        return f"({inner})"
    if kind == 3:
        return f"(?{draws.choice(['i', '-i', 's', 'a'])}:{inner})"
    if kind == 4:
        return f"{draws.choice(['^', ''])}(?{draws.choice('=!')}{inner}){drawn(draws, depth - 1)}"
    return inner + drawn(draws, depth - 1)


def test_it_matches_as_re_does() -> None:
    draws = random.Random(7)
    compared = 0
    for _ in range(2000):
        pattern = drawn(draws)
        try:
            wanted = re.compile(pattern)
        except re.error:
            with pytest.raises(ValueError):
                Expression(pattern)
            continue
        with suppress(ValueError):
            found = Expression(pattern)
            for _ in range(8):
                text = "".join(draws.choices(LETTERS, k=draws.randrange(8))) or "a" * (
                    r"\B" in pattern
                )  # of "" it is false before 3.14
                assert found.fullmatch(text) == (wanted.fullmatch(text) is not None), (pattern, text)
                assert found.match(text) == (wanted.match(text) is not None), (pattern, text)
                compared += 1
    assert compared > 10_000


HOSTILE = [
    *"""
        (a+)+b (a|a)*b (a|aa)+$b (.*)*b ((a*)*)*b (?:a?){200}a{200}b (a*a*a*a*a*)*b a{0,999}a{0,999}b
    """.split(),
    *("(?:(?:(?:){9999}){9999}){9999}b", "((((a{30}){30}){30}){30})", "(" * 900 + "a" + ")*" * 900, "a|" * 2000 + "b"),
    *("(?:(?!(a+)+b)a)*b", "(?:a(?=(?:a(?=(?:a(?=a*b))*b))*b))*b", "(?:(?=a*b)|a){900}b"),
    *("^(?!(a+)+b)(a+)+b", "(?i:(a+)+B)", r"(\w+\.?)+!", "(a+)+" * 500 + "b", "[ab]*" * 800 + "c"),
]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_hostile_expressions_end_at_once(pattern: str) -> None:
    began, text = time.perf_counter(), "a" * 300
    with suppress(ValueError):
        Expression(pattern, StepBudget()).fullmatch(text)
    with suppress(UserError):
        fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": pattern}
        read_lora_config({**fields, "rank_pattern": {pattern: 2}}).is_targeted(text)
    config = {"quant_method": "fp8", "ignored_layers": [f"re:{pattern}"]}
    with suppress(UserError):
        stored = read_stored({"quantization_config": {**config, "weight_block_size": [128, 128]}})
        assert stored is not None
        stored.covers(text)
    assert time.perf_counter() - began < 5.0  # re takes years


def test_what_cannot_be_followed_is_refused() -> None:
    for pattern, why in (
        *((r"(a)\1", "backreference"), ("(?<=a)b", "lookbehind"), ("(?>a)b*", "atomic")),
        *(("a*+b", "possessive"), ("(a)?(?(1)b|c)", "conditional"), ("(?m)^a*", "flags"), ("a" * 5000, "longer")),
    ):
        with pytest.raises(ValueError, match=why):
            Expression(pattern)
