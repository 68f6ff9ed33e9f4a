"""Random schemas: jsonschema accepts every output of a mask, and the mask allows every value that jsonschema accepts.

Numbers are decimals, because floats have no exact multiples. A schema that cannot be followed may be refused.
"""

import itertools
import json
import os
import random
import signal
import warnings
from collections.abc import Iterator
from decimal import Context, Decimal, setcontext
from functools import cache
from typing import Any

import jsonschema
import pytest
from jsonschema import validators

from jaxllm import embedded
from jaxllm.structured_output.grammars import Grammar
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from tests.structured_output.draws import Drawing

NAMES = ["a", "b", 'q"', "x1", "x_2", "é", "a\\b", "n n"]
TEXTS = ["", "a", "b", "ab", 'q"', "\\", "é", "日\U0001f389", "\n", "x1", "a\tb", "C:\\x", "12", "-", "a b", "\x7f"]
NUMBERS = [0, 1, -1, 2, 3, 7, 10, -10, 0.5, -0.5, 1.5, 0.1, 0.25, 2.75, 1e3, 1e-3, 99.9, 2**31, 2**53, 2**63 - 1]
ATOMS = [
    *("a", "b", "é", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", ".", "[a-c]", "[^a-c]", '[^"]', r"[^\\]", r'[^"\\]'),
    *(r'[^<>:"/\\|?*]', r"[\w-]", r"[^\s\d]", r"\.", r"\\", '"', "x", "1", "/", r"[^\n]", r"[\x00-\x7f]", "[ -~]"),
    *("(?i:a)", r"[^\W_]", "[[]", "[a&&b]", r"[^\x00-\x1f]", "-"),
]  # fmt: skip
MOST_SECONDS = 5.0  # of processor time for a verdict of jsonschema
FORMATS = ["date", "ipv4", "uuid", "email", "password", "binary", "path", "x-vendor"]


@pytest.fixture(scope="module")
def drawing() -> Drawing:
    tokenizer = load_tokenizer(embedded.MODEL_DIR)
    assert tokenizer.eos_token_id is not None
    return Drawing(tokenizer, tokenizer.eos_token_id)


def _pattern(rng: random.Random) -> str:
    def part(depth: int) -> str:
        match rng.choice(["atom", "atom", "atom", "row", "or", "repeat"]) if depth < 3 else "atom":
            case "row":
                return part(depth + 1) + part(depth + 1)
            case "or":
                return f"({rng.choice(['', '^'])}{part(depth + 1)}|{part(depth + 1)}{rng.choice(['', '$'])})"
            case "repeat":
                return f"(?:{part(depth + 1)}){rng.choice(['*', '+', '?', '{2}', '{1,3}', '{,2}'])}"
        return rng.choice(ATOMS)

    return rng.choice(["{}", "^{}$", "^{}$", "^{}", "{}$"]).format(part(0))


def _bounds(rng: random.Random) -> dict[str, Any]:
    given: dict[str, Any] = {}
    low = rng.choice(NUMBERS)
    if rng.random() < 0.6:
        given[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.6:
        given[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.choice([0, 0.5, 0.25, 1, 2, 10, 1000])
    if rng.random() < 0.3:
        given["multipleOf"] = rng.choice([1, 2, 5, 0.5, 0.1, 0.01, 2.5, 1.1, 0.07, 1000])
    return given


def _text(rng: random.Random) -> dict[str, Any]:
    given: dict[str, Any] = {}
    least = rng.randrange(3)
    if rng.random() < 0.4:
        given["minLength"] = least
    if rng.random() < 0.4:
        given["maxLength"] = least + rng.randrange(4)
    if rng.random() < 0.5:
        given["pattern"] = _pattern(rng)
    if rng.random() < 0.15:
        given["format"] = rng.choice(FORMATS)
    return given


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    given: dict[str, Any] = {}
    least = rng.randrange(3)
    if rng.random() < 0.5:
        given["prefixItems"] = [_schema(rng, depth + 1) for _ in range(rng.randrange(3))]
    if rng.random() < 0.7:
        given["items"] = rng.choice([True, False, *[_schema(rng, depth + 1)] * 4])
    if rng.random() < 0.4:
        given["minItems"] = least
    if rng.random() < 0.4:
        given["maxItems"] = least + rng.randrange(3)
    if rng.random() < 0.1:
        given["uniqueItems"] = rng.choice([True, False])
    if rng.random() < 0.1:
        given["additionalItems"] = rng.choice([True, False])
    return given


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    given: dict[str, Any] = {}
    names = rng.sample(NAMES, rng.randrange(4))
    if rng.random() < 0.8:
        given["properties"] = {name: _schema(rng, depth + 1) for name in names}
    if rng.random() < 0.6:
        given["required"] = rng.sample(NAMES[:4], rng.randrange(3)) if rng.random() < 0.3 else names[: rng.randrange(4)]
    if rng.random() < 0.2:
        patterns = [rng.choice(["^x", "[0-9]$", '^[^"]$', _pattern(rng)]) for _ in range(rng.randrange(1, 3))]
        given["patternProperties"] = {pattern: _schema(rng, depth + 1) for pattern in patterns}
    if rng.random() < 0.6:
        given["additionalProperties"] = rng.choice([True, False, False, _schema(rng, depth + 1)])
    if rng.random() < 0.1:
        given["minProperties"] = rng.randrange(3)
    if rng.random() < 0.1:
        given["maxProperties"] = rng.randrange(4)
    return given


def _value(rng: random.Random, depth: int = 0) -> Any:
    match rng.choice(["text", "number", "other"] + ["array", "object"] * (depth < 2)):
        case "text":
            return rng.choice(TEXTS)
        case "number":
            return rng.choice(NUMBERS)
        case "array":
            return [_value(rng, depth + 1) for _ in range(rng.randrange(3))]
        case "object":
            return {name: _value(rng, depth + 1) for name in rng.sample(NAMES, rng.randrange(3))}
    return rng.choice([None, True, False])


def _schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a random schema with its keywords in random order."""
    kinds = ["string", "string", "number", "integer", "boolean", "null", "enum", "const"]
    kinds += ["object", "object", "array", "array", "anyOf", "oneOf", "allOf", "$ref", "types"] * (depth < 3)
    kind = rng.choice(kinds)
    parts: dict[str, Any] = {}
    match kind:
        case "enum":
            parts = {"enum": [_value(rng) for _ in range(rng.randrange(1, 4))]}
        case "const":
            parts = {"const": _value(rng)}
        case "anyOf" | "oneOf" | "allOf":
            parts = {kind: [_schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]}
        case "$ref":
            parts = {"$ref": rng.choice(["#/$defs/d", "#/$defs/d", "#/$defs/e", "#"])}
        case "types":
            parts = {"type": rng.sample(["string", "null", "integer", "number", "array", "object"], 2)}
        case _:
            parts = {"type": kind} if rng.random() < 0.9 else {}
    for made, often in (
        (_bounds(rng), kind in ("number", "integer", "types")),
        (_text(rng), kind in ("string", "types")),
        (_array(rng, depth) if depth < 3 else {}, kind == "array"),
        (_object(rng, depth) if depth < 3 else {}, kind == "object"),
    ):
        if rng.random() < (0.9 if often else 0.04):
            parts |= made
    if rng.random() < 0.1:
        parts |= {"title": "t", "deprecated": True, "x-note": {"pattern": "a"}}
    names = list(parts)
    rng.shuffle(names)
    schema = {name: parts[name] for name in names}
    if depth == 0:
        schema["$defs"] = {name: _schema(rng, 2) for name in "de"}
    return schema


def _is_integer(_: object, value: object) -> bool:
    if isinstance(value, Decimal):
        return value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


def _read(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


def _judge_of(schema: object) -> Any:
    """Return jsonschema's validator of a schema, with numbers read as decimals."""
    kind = jsonschema.Draft202012Validator
    checker = kind.TYPE_CHECKER.redefine("integer", _is_integer)
    exact = validators.extend(kind, type_checker=checker)
    return exact(_read(json.dumps(schema)), format_checker=jsonschema.FormatChecker(["date", "ipv4", "uuid"]))


def _candidates(rng: random.Random, schema: Any, texts: list[str], depth: int = 0) -> Iterator[Any]:
    """Yield values that may satisfy a schema: its constants, earlier outputs, and variations of both."""
    yield from (_read(text) for text in texts)
    yield from (_changed(rng, _read(text)) for text in texts for _ in range(3))
    for _ in range(4):
        yield _value(rng)
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            waiting += each.values()
            yield from each.get("enum", []) if isinstance(each.get("enum"), list) else []
            yield each.get("const")
            for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
                if isinstance(each.get(name), int | float):
                    bound = Decimal(repr(each[name]))
                    yield from (
                        bound,
                        bound + 1,
                        bound - 1,
                        bound + Decimal("0.01"),
                        bound - Decimal("0.01"),
                        bound * 3,
                    )
            if isinstance(each.get("properties"), dict):
                names = [*each["properties"], *(each.get("required") or []), *rng.sample(NAMES, 1)]
                yield {name: rng.choice([_value(rng), *map(_read, texts)]) for name in names if rng.random() < 0.7}


def _written(value: Any) -> str:
    return next(_spellings(value))


def _changed(rng: random.Random, value: Any) -> Any:
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return rng.choice([value[:at] + rng.choice(TEXTS) + value[at:], value[:at] + value[at + 1 :]])
    if isinstance(value, bool) or value is None:
        return rng.choice([None, True, False])
    if isinstance(value, int | Decimal):
        return value + rng.choice([1, -1, Decimal("0.5"), Decimal("0.01"), -2 * value])
    if isinstance(value, list):
        items = [_changed(rng, each) if rng.random() < 0.5 else each for each in value]
        return rng.choice([items, items[:-1], [*items, _value(rng)]])
    items = [(name, _changed(rng, each) if rng.random() < 0.5 else each) for name, each in value.items()]
    rng.shuffle(items)
    return dict(rng.choice([items, items[:-1], [*items, (rng.choice(NAMES), _value(rng))]]))


def _spellings(value: Any) -> Iterator[str]:
    """Yield the JSON texts of a value with all orders of members: a grammar allows one order."""
    if isinstance(value, dict):
        for members in itertools.permutations(value.items()):
            names = [json.dumps(name, ensure_ascii=False) for name, _ in members]
            for values in itertools.product(*(list(_spellings(each)) for _, each in members)):
                yield "{" + ",".join(f"{name}:{each}" for name, each in zip(names, values, strict=True)) + "}"
    elif isinstance(value, list):
        for values in itertools.product(*(list(_spellings(each)) for each in value)):
            yield f"[{','.join(values)}]"
    elif isinstance(value, str):
        yield json.dumps(value, ensure_ascii=False)
    elif isinstance(value, float | int | Decimal) and not isinstance(value, bool):
        number = value if isinstance(value, Decimal) else Decimal(repr(value))
        yield f"{number.normalize() + 0:f}"
    else:
        yield json.dumps(value)


def _is_out_of_reach(value: Any, schema: str) -> bool:
    """Whether docs/limits.md excludes a value: it needs a \\u escape, or dialects of patterns differ on it."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    doubted = (
        not text.isascii() and any(each in schema for each in (r"\\d", r"\\w", r"\\D", r"\\W", r"\\s", r"\\S"))
    ) or ("$" in schema.replace("$defs", "").replace("$ref", "") and r"\n" in text)
    # jsonschema accepts more than these formats allow.
    return (
        any(each in schema for each in ('"email"', '"uuid"'))
        or doubted
        or "\x7f" in text
        or r"\u" in text
        or len(text) > 200
    )


@cache
def _byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    pieces = [(tokenizer.piece(token), token) for token in tokenizer.ids]
    return {piece[0]: token for piece, token in pieces if isinstance(piece, bytes) and len(piece) == 1}


def _accepts(drawing: Drawing, grammar: Grammar, text: str) -> bool:
    matcher = grammar.begin().matchers[0]
    tokens = [_byte_tokens(drawing.tokenizer)[each] for each in text.encode()]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def _is_valid(judging: Any, value: Any) -> bool | None:
    """Return the verdict of jsonschema; None for infinite recursion, or a pattern whose backtracking takes too long."""
    signal.signal(signal.SIGVTALRM, _on_late)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    try:
        return judging.is_valid(value)
    except (RecursionError, TimeoutError):
        return None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _on_late(*_: Any) -> None:
    raise TimeoutError


def judge(drawing: Drawing, seed: int, num_outputs: int = 3) -> tuple[int, int, int]:
    """Check a random schema; return whether it compiles, and the numbers of outputs and values."""
    rng = random.Random(seed)
    schema = _schema(rng)
    grammar = drawing.compile(json=json.dumps(schema))
    if grammar is None:
        return 0, 0, 0
    judging = _judge_of(schema)
    warnings.simplefilter("ignore", FutureWarning)  # of "[[" in patterns
    texts = [text for each in range(num_outputs) if (text := drawing.text(grammar, each, most=80)) is not None]
    for text in texts:
        assert _is_valid(judging, _read(text)) is not False, f"{seed}: {json.dumps(schema)} accepts {text}"
    num_values = 0
    for drawn in itertools.islice(_candidates(rng, schema, texts), 60):
        value = _read(_written(drawn))
        if _is_out_of_reach(value, json.dumps(schema)) or not _is_valid(judging, value):
            continue
        num_values += 1
        spellings = itertools.islice(_spellings(value), 200)
        assert any(_accepts(drawing, grammar, each) for each in spellings), (
            f"{seed}: {json.dumps(schema)} cannot write {_written(value)}"
        )
    return 1, len(texts), num_values


def _judge_many(drawing: Drawing, seeds: range) -> None:
    setcontext(Context(prec=400))  # of the remainders of long numbers
    compiled, outputs, values = (sum(each) for each in zip(*(judge(drawing, seed) for seed in seeds), strict=True))
    assert compiled > len(seeds) / 3 and outputs > compiled and values > compiled, (compiled, outputs, values)


def test_what_a_mask_lets_through_satisfies_the_schema_and_all_that_does_can_be_written(drawing: Drawing) -> None:
    _judge_many(drawing, range(200))


@pytest.mark.slow  # 20,000 schemas; JAXLLM_SCHEMAS=FIRST:LAST draws a part of them
def test_what_a_mask_lets_through_satisfies_any_schema(drawing: Drawing) -> None:
    first, last = map(int, os.environ.get("JAXLLM_SCHEMAS", "0:20000").split(":"))
    _judge_many(drawing, range(first, last))
