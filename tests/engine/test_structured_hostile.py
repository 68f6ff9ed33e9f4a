"""Expensive constraints are answered or refused in time, slow other requests little, and leak no memory.

Rows 19 and 20 of the acceptance tests. The bounds on time are for the slowest of our machines.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams, UserError
from jaxllm.structured_output.grammars import MAX_KEPT
from tests.support import paths
from tests.support.sizes import SLOTS

STORIES = str(paths.STORIES)
MOST_SECONDS = 1.0  # to answer or refuse
CLASSES = [r"\w", r"\W", r"\d", r"\s", r"\S", ".", r"[^\x00-\x7f]", "[\u4e00-\u9fff]", "[\U0001f300-\U0001faff]"]

RING = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
DOUBLING = "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)) + '\nr40: "a" | ""'
TERMINALS = f"start: ({'|'.join(f'T{i}' for i in range(900))})+\n" + "\n".join(f"T{i}: /[a-z]+{i}/" for i in range(900))
INTERSECTED = "start: A\nA: " + " & ".join(f"/.*[{one}-m].{{40}}{one}.*/" for one in "abc") + "\n"


def _nested(depth: int, make: Any) -> Any:
    value: Any = {"type": "string"}
    for _ in range(depth):
        value = make(value)
    return value


def _hostile() -> Iterator[tuple[str, dict[str, Any]]]:
    yield from (
        (f"quantifiers {one}", {"regex": one})
        for one in (
            "(a+)+", "(a+)+$", "(a*)*b", "(a|a)*b", "(a|aa)+$", "([a-zA-Z]+)*1", "(.*a){12}", "(.*a){25}b",
            "(a?){60}a{60}",
            "((a+)+)+c", "(x+x+)+y", "(a{1,100}){1,100}", "((a{1,30}){1,30}){1,30}", "(((a{0,9}){0,9}){0,9}){0,9}",
            "^(([a-z])+.)+[A-Z]([a-z])+$", r"^(a|b|ab)*(?:ba)*c$", r"(\w+\s?)*!", r"(\d+)*\.(\d+)*",
            "a{8000}", "(?:){999}",
            "[ab]*a[ab]{14}", "[ab]*a[ab]{60}", "[ab]*a[ab]{800}", ".*a.{300}b", "(.*[a-f].{9}){3}x", "a?" * 2000,
            "(" * 200 + "a" + ")*" * 200, "|".join(f"{number:04x}" for number in range(1600)),
            "(a|b|c|d|e)*f(a|b){30}g",
            r"^([a-zA-Z0-9])(([\-.]|[_]+)?([a-zA-Z0-9]+))*(@){1}[a-z0-9]+[.]{1}(([a-z]{2,3})|([a-z]{2,3}[.]{1}[a-z]{2,3}))$",
        )
    )  # fmt: skip
    for one in CLASSES:
        yield f"class {one}", {"regex": f"{one}{{1,90}}"}
        yield f"class twice {one}", {"regex": f"({one}+x)+{one}{{50}}"}
        yield f"class without case {one}", {"regex": f"(?i:{one}a)*"}
    for number in (100, 2500, 9000, 20_000, 26_000):
        yield f"enum {number}", {"json": {"enum": [f"value {each}" for each in range(number)][: 2**18 // 14]}}
        yield f"choice {number}", {"choice": [f"value {each}" for each in range(number)][: 2**18 // 12]}
        yield f"integers {number}", {"json": {"enum": [each * 7 for each in range(number)]}}
    for depth in (9, 20, 30, 31):
        yield f"objects {depth}", {"json": _nested(depth, lambda one: {"properties": {"a": one}, "required": ["a"]})}
        yield f"lists {depth}", {"json": _nested(depth, lambda one: {"type": "array", "items": one})}
        yield f"anyOf {depth}", {"json": _nested(depth, lambda one: {"anyOf": [one, {"type": "null"}]})}
        yield f"anyOf twice {depth}", {"json": _nested(depth // 3, lambda one: {"anyOf": [one, {"items": one}]})}
        yield f"allOf {depth}", {"json": _nested(depth, lambda one: {"allOf": [one, {"minLength": 1}]})}
    for number in (50, 400, 1900, 2100):
        names = [f"p{each}" for each in range(number)]
        yield f"properties {number}", {"json": {"properties": {name: {} for name in names}}}
        yield f"required {number}", {"json": {"properties": {name: {} for name in names}, "required": names}}
        yield f"bounds {number}", {"json": {"type": "array", "minItems": number, "maxItems": 2 * number}}
        yield f"lengths {number}", {"json": {"type": "string", "minLength": number, "maxLength": 10 * number}}
    yield from (
        ("all of a thousand", {"json": {"allOf": [{"type": "string", "pattern": f".*{one}.*"} for one in range(14)]}}),
        ("any of a thousand", {"json": {"anyOf": [{"properties": {f"p{one}": {"const": one}}} for one in range(900)]}}),
        ("one of many", {"json": {"oneOf": [{"const": one} for one in range(900)]}}),
        ("divisors", {"json": {"type": "integer", "multipleOf": 9973}}),
        ("a large range", {"json": {"type": "number", "minimum": -1e300, "maximum": 1.234567890123456e300}}),
        ("a reference to itself", {"json": {"$ref": "#"}}),
        ("references in a ring", {"json": {"$ref": "#/$defs/a", "$defs": RING}}),
        ("a tree", {"json": {"items": {"$ref": "#"}, "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}}}),
        ("patterns of names", {"json": {"patternProperties": {f"^{one}.*x$": {} for one in "abcdefghijklmnop"}}}),
        ("names", {"json": {"type": "object", "propertyNames": {"pattern": "(a+)+b"}}}),
        ("whitespace", {"json": {"type": "array"}, "whitespace_pattern": "[ \\n]*"}),
        ("whitespace twice", {"json": {"type": "array"}, "whitespace_pattern": "( +)+"}),
        ("an ambiguous grammar", {"grammar": 'start: x\nx: x x | x x x | "a" | ""\n'}),
        ("a grammar that begins with itself", {"grammar": 'start: start "a" | "b"\n'}),
        ("a grammar that ends with itself", {"grammar": 'start: "a" start | "b"\n'}),
        ("a grammar of brackets", {"grammar": 'start: "(" start ")" start | ""\n'}),
        ("rules that double", {"grammar": DOUBLING}),
        ("many terminals", {"grammar": TERMINALS}),
        ("intersected terminals", {"grammar": INTERSECTED}),
        ("a complement", {"grammar": "start: A\nA: /[a-z]{1,99}/ & ~/.*(abc|bcd|cde){2}.*/\n"}),
    )


HOSTILE = dict(_hostile())


def params(asked: Any = None, **own: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=asked, **{"temperature": 1.0, "seed": 1, "max_tokens": 8, **own})


@pytest.mark.ci
def test_each_is_answered_or_refused_in_time() -> None:
    def seconds(asked: Any) -> float:
        began = time.process_time()  # excludes other processes on the machine
        with suppress(UserError):
            (output,) = llm.generate("Tom", params(asked), use_tqdm=False)
            assert output.outputs[0].finish_reason in ("stop", "length", "error")
        return time.process_time() - began

    with LLM(STORIES, **SLOTS) as llm:
        seconds({"regex": "a"})
        times = {name: seconds(asked) for name, asked in HOSTILE.items()}
        # In rare runs a garbage collection or other load on the machine turns 0.3 seconds into 1.9.
        late = {
            name: [took, *again]
            for name, took in times.items()
            if took > MOST_SECONDS
            if min(again := [seconds(HOSTILE[name]) for _ in range(2)]) > MOST_SECONDS
        }
        assert not llm.engine.outputs.sequences
    assert len(times) >= 100 and not late, late


def _step_times(llm: LLM, others: list[SamplingParams]) -> list[float]:
    """Run requests one by one next to a plain request; return the CPU seconds of each step with both."""
    engine, times, number = llm.engine, [], itertools.count()
    for own in others:
        if "plain" not in engine.outputs.groups:
            engine.add_request("plain", "Tom", params(max_tokens=400, ignore_eos=True))
        try:
            engine.add_request(name := str(next(number)), "Tom", own)
        except UserError:
            continue
        engine.step()
        while name in engine.outputs.groups:
            began = time.process_time()
            engine.step()
            times.append(time.process_time() - began)
    engine.abort_request("plain")
    return times


@pytest.mark.ci
def test_others_hardly_notice() -> None:
    """Expensive constraints slow the steps little; another thread compiles, see test_structured_accidents.py."""
    usual = [params({"regex": f"[a-z ]{{20}}{number}"}) for number in range(150)]
    hostile = []
    for asked in HOSTILE.values():
        with suppress(UserError):
            hostile.append(params(asked))
    with LLM(STORIES, **SLOTS) as llm:
        _step_times(llm, usual[:20])
        before, beside = _step_times(llm, usual), _step_times(llm, hostile)
    found = [round(1000 * float(np.quantile(times, 0.99)), 1) for times in (before, beside)]
    assert found[1] < 2 * found[0], (found, max(beside))


def _resident() -> int:
    """Return this process's memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
@pytest.mark.parametrize("num_schemas", [10_000])
def test_a_flood_of_schemas_takes_no_more_memory_once_as_many_are_kept_as_may_be(num_schemas: int) -> None:
    resident: list[int] = []
    with LLM(STORIES, **SLOTS) as llm:
        for first in range(0, num_schemas, 8):
            asked = [
                {"json": {"properties": {f"p{first + each}_{other}": {"type": "string"} for other in range(9)}}}
                for each in range(8)
            ]
            llm.generate(["Tom"] * 8, [params(one, max_tokens=4) for one in asked], use_tqdm=False)
            if first % 200 == 0 and first > 4 * MAX_KEPT:
                gc.collect()
                resident.append(_resident())
    half = len(resident) // 2
    growth = (np.mean(resident[half:]) - np.mean(resident[:half])) / (num_schemas / 2)
    assert growth < 500, (growth, [one >> 20 for one in resident])  # leaked bytes per schema, which takes 100,000


@pytest.mark.slow
def test_outputs_of_one_grammar_take_no_more_memory_and_always_end_well() -> None:
    """Automaton states are built as outputs need them, so any number of outputs fits in memory, and all succeed."""
    asked = {"regex": "x[ab]*a[ab]{18}"}
    with LLM(STORIES, **SLOTS) as llm:
        for first in itertools.islice(itertools.count(0, 64), 40):
            own = [params(asked, max_tokens=60, seed=first + each) for each in range(64)]
            for output in llm.generate(["Tom"] * 64, own, use_tqdm=False):
                assert output.outputs[0].finish_reason != "error", (first, output.outputs[0].stop_reason)
