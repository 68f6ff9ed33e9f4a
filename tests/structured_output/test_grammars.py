"""Constraints: compilation, refusals and their messages, masks, forced tokens, errors."""

import gc
import json
import re
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest

from jaxllm import embedded
from jaxllm.errors import UserError
from jaxllm.freed_memory import return_freed_memory
from jaxllm.structured_output import grammars as grammars_module
from jaxllm.structured_output.constraint import Constraint
from jaxllm.structured_output.expressions import translate
from jaxllm.structured_output.grammars import Grammars
from jaxllm.structured_output.schemas import prepare
from jaxllm.structured_outputs_params import StructuredOutputsParams as Params
from jaxllm.text.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from tests.structured_output.draws import Drawing, bits
from tests.support.inspection import bytes_kept_by
from tests.support.paths import STORIES
from tests.support.tokenizer_kinds import KINDS, build

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(embedded.MODEL_DIR)


@pytest.fixture(scope="module")
def drawing(tokenizer: Tokenizer) -> Drawing:
    assert tokenizer.eos_token_id is not None
    return Drawing(tokenizer, tokenizer.eos_token_id)


def _row(grammars: Grammars, constraint: Constraint, vocab_size: int) -> list[int]:
    masks = np.full((3, -(-vocab_size // 32)), 0x55555555, np.int32)
    grammars.fill([(constraint, 1)], masks)
    assert (masks[[0, 2]] == 0x55555555).all()
    return bits(masks[1]).tolist()


def _write(drawing: Drawing, constraint: Constraint, text: str) -> list[int]:
    """Consume a text whose tokens the mask must all allow; return the tokens allowed next."""
    for token in drawing.tokenizer.encode(text, add_special_tokens=False):
        assert token in _row(drawing.grammars, constraint, drawing.vocab_size)
        constraint.consume(token)
        assert constraint.error is None
    return _row(drawing.grammars, constraint, drawing.vocab_size)


def _spell(drawing: Drawing, constraint: Constraint, text: str) -> list[int]:
    """Consume a text in the longest tokens that the mask allows; return the tokens allowed next."""
    rest = text.encode()
    while True:
        row = _row(drawing.grammars, constraint, drawing.vocab_size)
        if not rest:
            return row
        fitting = [token for token in row if token != drawing.eos and rest.startswith(drawing.tokenizer.piece(token))]
        token = max(fitting, key=lambda token: len(drawing.tokenizer.piece(token)))
        rest = rest.removeprefix(drawing.tokenizer.piece(token))
        constraint.consume(token)


def _refusal(grammars: Grammars, **asked: object) -> str:
    with pytest.raises(UserError) as caught:
        grammars.compile(Params(**asked))  # type: ignore[arg-type]
    assert caught.value.parameter == "structured_outputs"
    message = str(caught.value)
    assert message.isprintable() and len(message) < 400
    return message


def test_the_end_is_allowed_where_the_grammar_is_satisfied_and_alone_where_nothing_may_follow(tokenizer):
    eos = [2, tokenizer.vocab_size + 3]
    grammars = Grammars(tokenizer, tokenizer.vocab_size + 70, [*eos, 10**6])
    constraint = grammars.compile(Params(regex="a{1,2}")).begin()
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    size = tokenizer.vocab_size + 70
    assert not set(eos) & set(_row(grammars, constraint, size))
    constraint.consume(a)
    assert set(_row(grammars, constraint, size)) == {a, *eos}
    constraint.consume(a)
    assert _row(grammars, constraint, size) == eos
    constraint.consume(eos[1])
    assert constraint.error is None and _row(grammars, constraint, size) == eos
    constraint.consume(a)
    assert constraint.error and _row(grammars, constraint, size) == []


@pytest.mark.parametrize("token", [0, 1, 500, 10**9, -1, 2**40])
def test_a_token_that_does_not_fit_is_an_error_whose_row_is_zero(drawing, token):
    constraint = drawing.grammars.compile(Params(regex="[0-9]x")).begin()
    constraint.consume(token)
    assert constraint.error and "\n" not in constraint.error and "<" not in constraint.error
    assert _row(drawing.grammars, constraint, drawing.vocab_size) == []
    constraint.consume(drawing.eos)
    assert constraint.forced() == [] and constraint.error


def test_the_end_before_the_end_is_an_error(drawing):
    constraint = drawing.grammars.compile(Params(choice=("yes",))).begin()
    constraint.consume(drawing.eos)
    assert constraint.error


def test_several_rows_are_those_of_each_alone(drawing):
    asked = [Params(regex="[ab]+"), Params(json=PERSON), Params(choice=("x", "yz")), Params(regex="c", begin_after="!")]
    constraints = [drawing.grammars.compile(each).begin() for each in asked]
    failed = drawing.grammars.compile(asked[0]).begin()
    failed.consume(0)
    masks = np.zeros((7, -(-drawing.vocab_size // 32)), np.int32)
    masks[1] = -1
    drawing.grammars.fill([(failed, 1), *zip(constraints, [5, 0, 3, 4], strict=True)], masks)
    for row, constraint in zip([5, 0, 3, 4], constraints, strict=True):
        assert bits(masks[row]).tolist() == _row(drawing.grammars, constraint, drawing.vocab_size)
    assert not masks[[1, 2, 6]].any()
    drawing.grammars.fill([], masks)


def test_forced_tokens_are_the_text_that_must_come_and_not_its_end(drawing):
    constraint = drawing.grammars.compile(Params(json=PERSON, disable_any_whitespace=True)).begin()
    forced = constraint.forced()
    assert drawing.tokenizer.decode(forced) in '{"name":"' and len(forced) > 1
    assert constraint.forced() == forced
    constraint.expected = [*forced]  # one by one: each is the only one that its mask allows
    for number, token in enumerate(forced):
        assert constraint.expected == forced[number:]
        assert _row(drawing.grammars, constraint, drawing.vocab_size) == [token]
        constraint.consume(token)
    whole = drawing.grammars.compile(Params(choice=("Hello there",))).begin()
    for token in drawing.tokenizer.encode("Hello there", add_special_tokens=False):
        whole.consume(token)
    assert whole.forced() == [] and whole.error is None


def test_a_slow_token_holds_no_other_thread(drawing):
    """While a thread consumes a token of an ambiguous grammar, which takes 0.1 s in the end, others get the GIL."""
    constraint = drawing.grammars.compile(Params(grammar="start: s\ns: /[a-z ]/ | s s\n")).begin()
    longest, took, last = 0.0, 0.0, time.perf_counter()
    end = threading.Event()

    def tick() -> None:
        nonlocal longest, last
        while not end.is_set():
            time.sleep(0.0005)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    ticking = threading.Thread(target=tick)
    ticking.start()
    ids = drawing.tokenizer.encode(" once upon a time there was a little fox" * 9, add_special_tokens=False)
    shares = []
    for token in ids:
        _row(drawing.grammars, constraint, drawing.vocab_size)
        time.sleep(0.001)
        longest, began = 0.0, time.perf_counter()
        constraint.consume(token)
        took = time.perf_counter() - began
        time.sleep(0.001)
        if took > 0.01:
            shares.append(longest / took)
        if len(shares) == 10 or constraint.error is not None:
            break
    end.set()
    ticking.join()
    assert len(shares) > 3 and min(shares) < 0.5, shares


def test_outputs_of_one_grammar_do_not_disturb_each_other(drawing):
    grammar = drawing.grammars.compile(Params(regex="ab|cd"))
    one, other = grammar.begin(), grammar.begin()
    _write(drawing, one, "a")
    assert _write(drawing, other, "cd") == [drawing.eos]
    assert _write(drawing, one, "b") == [drawing.eos]


@pytest.mark.parametrize("text", ["So</think>", "<</think></think>", "a</th</think>\n", "é</think>"])
def test_a_constraint_begins_after_its_marker_however_the_tokens_cut_it(drawing, text):
    constraint = drawing.grammars.compile(Params(regex="z", begin_after="</think>")).begin()
    seen = b""
    for byte in text.encode():
        token = next(each for each in drawing.tokenizer.ids if drawing.tokenizer.piece(each) == bytes([byte]))
        assert constraint.is_active == (b"</think>" in seen)
        if constraint.is_active:
            return
        free = _row(drawing.grammars, constraint, drawing.vocab_size)
        assert len(free) == drawing.vocab_size - 1 and drawing.eos not in free
        assert constraint.forced() == []
        constraint.consume(token)
        seen += bytes([byte])
    assert constraint.is_active
    assert drawing.tokenizer.decode(_row(drawing.grammars, constraint, drawing.vocab_size)) == "z"


def test_a_special_token_can_be_the_marker_and_what_follows_it_is_constrained(drawing):
    name = drawing.tokenizer.token(drawing.eos)
    constraint = drawing.grammars.compile(Params(regex="z", begin_after=name)).begin()
    constraint.consume(drawing.eos)
    assert constraint.is_active and drawing.eos not in _row(drawing.grammars, constraint, drawing.vocab_size)


def test_an_output_opens_with_a_special_token_or_is_constrained_from_its_beginning(drawing):
    (special,) = drawing.tokenizer.special_ids - {drawing.eos, min(drawing.tokenizer.special_ids)}
    asked = Params(regex="z", begin_after="!", may_open_with=(drawing.tokenizer.token(special),))
    grammar = drawing.grammars.compile(asked)
    constraint = grammar.begin()
    assert special in _row(drawing.grammars, constraint, drawing.vocab_size)
    assert _write(drawing, grammar.begin(), "z") == [drawing.eos]
    constraint.consume(special)
    free = _row(drawing.grammars, constraint, drawing.vocab_size)
    assert not constraint.is_active and len(free) == drawing.vocab_size - 1 and drawing.eos not in free
    _write(drawing, constraint, "So!")
    assert _write(drawing, constraint, "z") == [drawing.eos]


def test_an_alternative_holds_where_the_constraint_does_and_behind_a_text_of_its_own(drawing):
    special = min(drawing.tokenizer.special_ids - {drawing.eos})
    asked = Params(
        choice=("yes", "no"), or_grammar=f'start: <[{special}]> "y"', or_grammar_after=(("#", 'start: "b"'),)
    )
    grammar = drawing.grammars.compile(replace(asked, begin_after="!", may_open_with=("?",)))
    for constraint in (grammar.begin(), grammar.begin()):
        assert special in _row(drawing.grammars, constraint, drawing.vocab_size)
        constraint.consume(special)
        assert _write(drawing, constraint, "y") == [drawing.eos]
    constraint = grammar.begin()
    _write(drawing, constraint, "?a!")
    assert _write(drawing, constraint, "no") == [drawing.eos]
    constraint = grammar.begin()
    _write(drawing, constraint, "?a#")
    assert _write(drawing, constraint, "b") == [drawing.eos]
    assert special not in _spell(drawing, grammar.begin(), "y")
    constraint = grammar.begin()
    constraint.consume(drawing.tokenizer.encode("b", add_special_tokens=False)[0])
    assert constraint.error


@pytest.mark.parametrize("asked", [{"json": {"type": "string"}}, {"regex": "(?s).*"}, {"grammar": "start: A\nA: ~/x/"}])
def test_no_special_token_stands_for_text(drawing, asked):
    constraint = drawing.grammars.compile(Params(**asked)).begin()
    if "json" in asked:
        _write(drawing, constraint, '"')
    special = drawing.tokenizer.special_ids - {drawing.eos}
    assert special and not special & set(_row(drawing.grammars, constraint, drawing.vocab_size))
    for character in drawing.tokenizer.token(min(special)):  # spelled in characters it is ordinary text
        _write(drawing, constraint, character)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_the_detokenizer_for_every_kind_of_tokenizer(kind):
    tokenizer = Tokenizer(build(kind), {}, {}, kind)
    eos = min(tokenizer.special_ids)
    drawing = Drawing(tokenizer, eos)
    if kind in ("wordpiece", "metaspace", "no_decoder"):
        assert "stands alone" in _refusal(drawing.grammars, regex="a")
        return
    drawing.prompt = [token for token in tokenizer.ids if tokenizer.token_text(token) == "a"][:1]
    drawing.weights[:] = 1
    for regex in (r"(the | the|a|\n){4}", r"[^a-z]{5}", "(<tool>|<|[|]end[|]>|é| ){3}"):
        grammar = drawing.compile(regex=regex)
        for seed in range(20):
            text = drawing.text(grammar, seed)
            assert text is not None and re.fullmatch(regex, text), (regex, text)


def test_a_text_that_a_tokenizer_begins_with_a_space_is_forced_without_it():
    tokenizer = load_tokenizer(STORIES)
    assert tokenizer.decode(tokenizer.encode("Once", add_special_tokens=False)) == "Once"
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [2])
    for text in ("Once upon a time", '{"a": [1]}', "é日\n"):
        constraint = grammars.compile(Params(choice=(text,))).begin()
        written = b""
        while (row := _row(grammars, constraint, tokenizer.vocab_size)) != [2]:
            piece = tokenizer.piece(row[0])
            written += piece if isinstance(piece, bytes) else piece[1].encode()
            constraint.consume(row[0])
        assert written.decode() == text


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance"),
        ({"anyOf": [{"items": {"x-guidance": {}}}]}, "x-guidance"),
        ({"$ref": "http://example.com/a.json"}, "http://example.com/a.json"),
        ({"properties": {"a": {"$ref": "other.json#/a"}}}, "other.json"),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "format": "idn-email"}, "idn-email"),
        ({"type": "string", "pattern": "(?=a)"}, "lookahead"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum"),
        (False, "false"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"minProperties": 2, "additionalProperties": {"type": "integer"}}, "minProperties"),
        ({"$ref": "#"}, "first token"),
        ({"type": "strin\x1b[31m"}, "strin"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_by_name(drawing, schema, named):
    assert named in _refusal(drawing.grammars, json=json.dumps(schema))


@pytest.mark.parametrize("name", ["password", "binary", "path", "x-vendor", "moon"])
def test_a_format_that_asserts_nothing_is_an_annotation(drawing, name):
    grammar = drawing.grammars.compile(Params(json={"type": "string", "format": name, "maxLength": 2}))
    assert drawing.eos in _spell(drawing, grammar.begin(), '"é"')


@pytest.mark.parametrize(
    ("regex", "named"),
    [
        ("(?=a)a", "lookahead"), ("a(?<!b)", "negative"), (r"(a)\1", "backreference"), 
        ("(a)?(?(1)b|c)", "conditional"),
        ("(?>a*)b", "atomic"), ("a*+b", "possessive"), (r"a\b", "boundary"), ("a^b", "^"), ("a$b", "$"),
        ("(", "not a valid reg"),
        ("[^a]", None), ("(?i)[^a]", "ignores case"), ("a{9000}", "fewer"), ("(" * 3000 + ")" * 3000, "deeply"),
        (r"\ud800", "surrogate"), ("a" * 9000, "characters"), ("(a{1000}){1000}", "fewer"),
    ],
)  # fmt: skip
def test_an_expression_that_cannot_be_followed_is_refused_by_name(drawing, regex, named):
    if named is None:
        drawing.grammars.compile(Params(regex=regex))
    else:
        assert named in _refusal(drawing.grammars, regex=regex)


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ("start: <|im_end|>", "im_end"), ("start: <[0-99]>", "[0-99]"), ('start[max_tokens=3]: "a"', "max_tokens"),
        ('start[temperature=0.5]: "a"', "temperature"), ('start[stop="x"]: /a*/', "stop"), ("start: b", "b"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "allow_invalid_utf8"), ('root ::= "a', "GBNF"),
        ('start: %json {"x-guidance": {"lenient": true}}', "x-guidance"), ("start: %json {", "JSON"),
        ("root ::= [a&&b]", "&&"), ("root ::= x", "x"), ('root ::= "a"\nroot ::= "b"', "twice"),
        ("nothing", "Expected token"),
        ("root ::= root", "first token"), ('root ::= "\\ud800"', "valid character"), ("start: /a{99999}/", "repeats"),
        ("start: " + "(" * 10**5 + '"a"' + ")" * 10**5, "deep"), ('start: "' + "a" * 9000 + '"', "9002"),
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_followed_is_refused_by_name(drawing, grammar, named):
    assert named in _refusal(drawing.grammars, grammar=grammar)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('start: "a" B\nB: /[0-9]+/', "a12"),
        ('root ::= "a" [0-9]+ # digits', "a12"),
        ('answer ::= yes | "no"\nyes ::= "\\u0041\\x42\\n"', "AB\n"),
        ('root ::= [\\u00e0-\\u00ef] "\\"" [^"]', 'é"x'),
        ('start: %json {"const": {"a": [1]}} "!"', '{"a": [1]}!'),
        ('start: "<|im_end|>" // not <|this|>', "<|im_end|>"),
    ],
)
def test_both_notations_of_a_grammar(drawing, grammar, text):
    constraint = drawing.grammars.compile(Params(grammar=grammar)).begin()
    assert drawing.eos in _spell(drawing, constraint, text)


def test_choices_of_any_characters(drawing):
    texts = ("a", "ab", 'q"\\/\n\r\t\x00\x7f\x1b', "é日\U0001f389\u2028", "'i", '"i', "</s>", "#//", "%json {}")
    grammar = drawing.grammars.compile(Params(choice=texts))
    for text in texts:
        assert drawing.eos in _spell(drawing, grammar.begin(), text)
    assert {drawing.text(grammar, seed) for seed in range(40)} <= set(texts)
    many = drawing.grammars.compile(Params(choice=tuple(f"choice {number}" for number in range(5000))))
    assert drawing.text(many, 0)


def test_whitespace_of_json(drawing):
    def outputs(**asked):
        grammar = drawing.compile(json=PERSON, **asked)
        return [each for each in (drawing.text(grammar, seed) for seed in range(20)) if each]

    assert any(" " in each for each in outputs())
    compact = outputs(disable_any_whitespace=True)
    assert all(each == json.dumps(json.loads(each), separators=(",", ":"), ensure_ascii=False) for each in compact)
    spaced = [each.replace(" ", "") for each in outputs(whitespace_pattern=r"\s?")]
    assert spaced and all("  " not in each for each in outputs(whitespace_pattern="[ ]?"))
    for pattern in ("x", ".", r"\S", r"[\t-\r]", "[^a]"):
        assert "whitespace_pattern" in _refusal(drawing.grammars, json=PERSON, whitespace_pattern=pattern)
    assert outputs(whitespace_pattern=r"[ \n\t]{0,3}")


def test_objects_are_closed_where_a_schema_is_and_not_where_data_is():
    inner = {"properties": {"b": {}}}
    schema = {
        "properties": {"properties": inner, "open": {"properties": {}, "additionalProperties": {}}},
        "enum": [inner], "const": inner, "anyOf": [inner],
        "$defs": {"const": inner}, "components": {"schemas": {"x": inner}},
        "items": {"type": "object"}, "unevaluated": {"patternProperties": {"a": True}, "unevaluatedProperties": True},
    }  # fmt: skip
    closed = {**inner, "additionalProperties": False}
    assert prepare(schema, True) == {
        **schema, "additionalProperties": False, "anyOf": [closed], "$defs": {"const": closed},
        "components": {"schemas": {"x": closed}},
        "properties": {"properties": closed, "open": schema["properties"]["open"]},
    }  # fmt: skip
    assert prepare(schema, False) == schema


def test_a_name_cannot_be_written_as_another_with_escapes(drawing):
    schema = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}, "type": "object"}
    for text in ('{"\\u', '{"b": "\\u'):
        constraint = drawing.grammars.compile(Params(json=schema)).begin()
        _spell(drawing, constraint, text[:-1])
        row = _row(drawing.grammars, constraint, drawing.vocab_size)
        assert not any(drawing.tokenizer.token_text(token).startswith("u") for token in row)


def test_disable_additional_properties(drawing):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammar = drawing.compile(json=schema, disable_additional_properties=True)
    for seed in range(20):
        assert set(json.loads(drawing.text(grammar, seed) or "{}")) <= {"a"}


def test_what_asserts_the_ends_of_an_expression_goes_without_saying():
    assert translate("^a$") == translate("a") == translate(r"\Aa\Z") == translate("(?m)^a$") == r"[\x{61}]"
    assert translate("(?:^ax|^bx)$") == translate("(?:ax|bx)")


def test_what_a_model_lacks_is_said(tokenizer):
    assert "skip_tokenizer_init" in _refusal(Grammars(NoTokenizer("x"), 100, [2]), regex="a")
    assert "end-of-sequence token" in _refusal(Grammars(tokenizer, 1536, [10**6]), regex="a")


def _references(count: int) -> dict:
    return {"$ref": "#/$defs/0", "$defs": {str(each): {"$ref": f"#/$defs/{each + 1}"} for each in range(count)}}


def _rules(count: int, rule: str) -> str:
    """Write rules that each refer to the next."""
    name, sign = rule[0], rule.split()[0].removeprefix("r{0}").removeprefix("R{0}")
    rules = [rule.format(each, each + 1) for each in range(count)]
    last = f'{name}{count}{sign} "b"' if sign else f'{name}{count} ::= "b"'
    return "\n".join([f"start: {name}0"] * bool(sign) + [*rules, last])


HOSTILE = {
    "nested quantifiers": {"regex": "((a{1,100}){1,100}){1,100}"},
    "a long automaton": {"regex": "[ab]*a[ab]{500}"},
    "optional characters": {"regex": "a?" * 4000},
    "a list": {"json": {"enum": [f"{number:x}" for number in range(25_000)]}},
    "choices": {"choice": tuple(f"{number:x}" for number in range(40_000))},
    "a product": {"json": {"allOf": [{"anyOf": [{"pattern": f"a{i}.*{j}"} for j in range(9)]} for i in range(9)]}},
    "intersections": {"json": {"allOf": [{"type": "string", "pattern": f"a.*{i}.*b"} for i in range(30)]}},
    "properties": {"json": {"properties": {f"p{i}": {} for i in range(2000)}}},
    "patterns of names": {"json": {"patternProperties": {f"^x{i}_[a-z]+$": {} for i in range(1000)}}},
    "divisors": {"json": {"anyOf": [{"type": "integer", "multipleOf": 777 + i} for i in range(9)]}},
    "a chain of references": {"json": _references(7000)},
    "a chain of rules": {"grammar": _rules(9000, 'r{0}: r{1} "a"')},
    "a chain of terminals": {"grammar": _rules(99, "R{0}: R{1} R{1}")},
    "GBNF's rules": {"grammar": _rules(9000, "r{0} ::= r{1}")},
    "rules that double": {"grammar": _rules(60, "r{0} ::= r{1} r{1}")},
    "ambiguity": {"grammar": 'root ::= root root | root root root | "a" | ""'},
    "schemas": {"grammar": "start: " + " | ".join('%json {"type": "object"}' for _ in range(9000))},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_constraint_takes_bounded_time(drawing, name):
    began = time.perf_counter()
    grammar = drawing.compile(**HOSTILE[name])
    compiled = time.perf_counter() - began
    assert compiled < 5  # measured: 0.7 at most
    if grammar is not None:
        drawing.text(grammar, 0, most=20)
        assert time.perf_counter() - began < 10


@pytest.fixture
def num_compiled(monkeypatch):
    """Return a function that counts compilations: a grammar from the cache is not compiled again."""
    threads, real = [], grammars_module.start_thread  # one thread per compilation
    monkeypatch.setattr(grammars_module, "start_thread", lambda *given: threads.append(None) or real(*given))

    def count(grammars, *asked):
        before = len(threads)
        for each in asked:
            grammars.compile(each)
        return len(threads) - before

    return count


def test_grammars_are_kept_within_bounds_and_shared_by_what_begins_after_something(
    tokenizer, monkeypatch, num_compiled
):
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [2])
    assert num_compiled(grammars, *(Params(regex="a", begin_after=marker) for marker in (None, "</a>", None))) == 1
    monkeypatch.setattr(grammars_module, "MAX_KEPT", 3)
    numbered = [Params(regex=f"b{number}") for number in range(10)]
    assert num_compiled(grammars, *numbered) == 10
    assert num_compiled(grammars, *numbered[7:]) == 0 and num_compiled(grammars, numbered[6]) == 1
    monkeypatch.setattr(grammars_module, "MAX_KEPT_CHARS", 100)
    short, long = Params(choice=("c" * 99,)), Params(choice=("d" * 101,))
    assert num_compiled(grammars, short, short) == 1 and num_compiled(grammars, numbered[6]) == 1
    assert num_compiled(grammars, long, long) == 2


@pytest.mark.parametrize(
    ("count", "most"), [(12, 16 << 20), pytest.param(64, grammars_module.MAX_KEPT_BYTES, marks=pytest.mark.slow)]
)
def test_lexers_that_grow_hold_no_more_memory_than_their_bound(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, num_compiled: Any, count: int, most: int
) -> None:
    monkeypatch.setattr(grammars_module, "MAX_KEPT_BYTES", most)
    grammars, process, rng = Grammars(tokenizer, tokenizer.vocab_size, [2]), psutil.Process(), np.random.default_rng(0)
    grammars.compile(Params(regex="a"))
    return_freed_memory()
    before = process.memory_info().rss
    for number in range(count):
        grammar = grammars.compile(Params(regex=f"([a-z]{{0,20}}[a-z0-9 ]{{0,20}}){{0,20}}{number:02}"))
        for _ in range(2):
            constraint = grammar.begin()
            for _ in range(60):
                if row := [token for token in _row(grammars, constraint, tokenizer.vocab_size) if token != 2]:
                    constraint.consume(int(rng.choice(row)))
        assert bytes_kept_by(grammars) <= most
    del grammar, constraint
    gc.collect()
    return_freed_memory()
    assert process.memory_info().rss - before < 1.25 * most  # 5 MiB measured; without a bound, 51 MiB
    assert num_compiled(grammars, Params(regex="a"), Params(regex="a")) <= 1, "there is room for others"


def test_threads_compile_the_same_at_once(tokenizer):
    grammars, errors = Grammars(tokenizer, tokenizer.vocab_size, [2]), []

    def work() -> None:
        try:
            for number in range(20):
                constraint = grammars.compile(Params(json={"maxLength": number})).begin()
                assert constraint.error is None
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("schema", [{"const": "a\0b"}, {"enum": [1, {"a\x01": 1}]}, {"properties": {"a\x1f": {}}}])
def test_what_json_can_write_only_as_an_escape_is_refused(schema: dict, drawing: Drawing) -> None:
    with pytest.raises(UserError, match="control character"):
        drawing.grammars.compile(Params(json=schema))


def test_a_kept_grammar_is_compiled_anew_now_and_then(drawing: Drawing, num_compiled: Any) -> None:
    """A cached grammar is recompiled now and then, because its lexer's states grow with outputs and have a limit."""
    asked = Params(regex="x[ab]*a[ab]{9}")
    assert num_compiled(drawing.grammars, *[asked] * grammars_module.MAX_USES) == 1
    assert num_compiled(drawing.grammars, asked) == 1


def test_a_grammar_whose_output_came_into_error_is_kept_no_longer(drawing: Drawing, num_compiled: Any) -> None:
    asked = Params(regex="a+b")
    first = drawing.grammars.compile(asked)
    constraint, masks = first.begin(), np.zeros((1, -(-drawing.vocab_size // 32)), np.int32)
    constraint.consume(drawing.tokenizer.encode("b", add_special_tokens=False)[0])
    drawing.grammars.fill([(constraint, 0)], masks)
    assert constraint.error and num_compiled(drawing.grammars, asked) == 1


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"multipleOf": 10**400}},
        {"json": {"anyOf": [{"multipleOf": 1e-300}] * 9000}},
        {"grammar": 'start: %json {"multipleOf": NaN}'},
    ],
)
def test_strange_divisors_are_judged_at_once(asked: dict, drawing: Drawing) -> None:
    began = time.process_time()
    try:
        drawing.grammars.compile(Params(**asked))
    except UserError as error:
        assert "\n" not in str(error)
    assert time.process_time() - began < 2.0


def test_a_mask_that_raises_is_one_constraints(drawing: Drawing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.structured_output.grammars.STEPS_UNWEIGHED", 1)
    grammar = drawing.grammars.compile(Params(regex="ab+"))
    broken, fine = grammar.begin(), grammar.begin()
    broken.matchers = [None]  # type: ignore[list-item]
    masks = np.zeros((2, -(-drawing.vocab_size // 32)), np.int32)
    drawing.grammars.fill([(broken, 0), (fine, 1)], masks)
    assert broken.error and not masks[0].any() and fine.error is None and masks[1].any()
