"""Values that are not JSON: Python literals against `ast`, and parameters by their types."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm_server.parsers.parameter_types import choices_of, converted, schema_of, types_of
from jaxllm_server.parsers.python_literal import PythonLiteral, as_json

_LITERAL = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e300, 1e300) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_SOUP = st.lists(
    st.sampled_from([*"[]{}'\"\\:,.-+_019eExuUna \n", '"""', "'''", "True", "None", "null", "\\x41", "\\u00e9"]),
    max_size=12,
).map("".join)


def _streamed(text: str) -> str | None:
    """Convert a literal character by character."""
    literal, json_text = PythonLiteral(), ""
    for character in text + "\n":
        if literal.read(character, 0) == 0 and character.strip():
            return None  # more text follows
        json_text += literal.take()
    return json_text if literal.is_over and not literal.is_broken else None


@settings(max_examples=300, deadline=None)
@given(value=_LITERAL)
def test_a_literal_is_the_json_of_its_value(value: Any) -> None:
    written = as_json(repr(value))
    assert written is not None and json.loads(written) == value
    assert json.loads(as_json(json.dumps(value)) or "") == value
    assert _streamed(repr(value)) == written


@settings(max_examples=600, deadline=None)
@given(text=_SOUP)
def test_what_is_taken_for_a_literal_is_one(text: str) -> None:
    written = as_json(text)
    if written is None:
        return
    value = json.loads(written)
    try:
        expected = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return  # JSON's constants, line breaks in strings, and invalid escapes
    assert value == json.loads(json.dumps(expected))


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("'it\\'s'", '"it\'s"'),
        ('"""a "quoted" word"""', '"a \\"quoted\\" word"'),
        ("''", '""'),
        ("'\\x41\\u00e9\\U0001f389\\ud800'", '"A\\u00e9\\ud83c\\udf89\\ud800"'),
        ("'\\d'", '"\\\\d"'),
        ("[1, 2,]", "[1, 2]"),
        ("{1: True}", '{"1": true}'),
        ("[+1, .5, 5., 1_000, 0x1F, 1e5]", "[1, 0.5, 5.0, 1000, 31, 1e5]"),
        ("9" * 100, "9" * 100),
        *((text, None) for text in ("", "foo", "(1, 2)", "{1}", "[,]", "[1,,2]", "[1", "1 2", "'a' 'b'", "f'a'", "-")),
        *((text, None) for text in ("inf", "nan", "1e999x", "{'a'}", "{'a': }", "'\\xZZ'", "'\\UFFFFFFFF'", "'a", "]")),
    ],
)
def test_literals(text: str, written: str | None) -> None:
    assert as_json(text) == written
    assert _streamed(text) == written


SCHEMA = {
    "$defs": {"Place": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}},
    "properties": {
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer"},
        "either": {"type": ["integer", "string", "null"]},
        "share": {"type": "float"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "place": {"$ref": "#/$defs/Place"},
        "loop": {"$ref": "#/$defs/Loop"},
        "bomb": {"anyOf": [{"$ref": "#/properties/bomb"}] * 100},
        "wrong": {"type": 5},
        "none": [],
    },
}


@pytest.mark.parametrize(
    ("parameter", "text", "written"),
    [
        ("text", "null", '"null"'),
        ("text", "5", '"5"'),
        ("maybe", "None", "null"),
        ("maybe", "none of it", '"none of it"'),
        ("count", "5", "5"),
        ("count", " -5\n", "-5"),
        ("count", "null", "null"),
        ("count", "5.5", '"5.5"'),
        ("count", "five", '"five"'),
        ("count", "9" * 5000, "9" * 5000),
        ("either", "5", "5"),
        ("either", "five", '"five"'),
        ("share", "0.50", "0.50"),
        ("share", ".5", "0.5"),
        ("share", "NaN", '"NaN"'),
        ("flag", "True", "true"),
        ("flag", "yes", '"yes"'),
        ("list", '["a", {"b": 1}]', '["a", {"b": 1}]'),
        ("list", "['a', None]", '["a", null]'),
        ("list", '{"a": 1}', '"{\\"a\\": 1}"'),
        ("list", "[" * 100_000, json.dumps("[" * 100_000)),
        ("place", "{'a': True}", '{"a": true}'),
        ("loop", "5", '"5"'),
        ("bomb", "5", '"5"'),
        ("wrong", "5", '"5"'),
        ("none", "5", '"5"'),
        ("unknown", "5", '"5"'),
    ],
)
def test_a_parameter_has_the_type_of_its_schema(parameter: str, text: str, written: str) -> None:
    tools = [{"function": {"name": "now"}}, {"function": {"name": "f", "parameters": SCHEMA}}]
    assert converted(text, types_of(schema_of(tools, "f"), parameter)) == written
    assert converted(text, types_of(schema_of(tools, "now"), parameter)) == json.dumps(text)


_SCALAR = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, 1.0]) | st.text("a1 tnul", max_size=4)


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    values=st.lists(_SCALAR, min_size=1, max_size=4),
    form=st.sampled_from(["enum", "const", "anyOf", "$ref"]),
)
def test_a_listed_value_comes_back_as_it_is(data: st.DataObject, values: list[Any], form: str) -> None:
    """Spelled as models do, in a schema without a type; values with the same spelling are interchangeable."""
    listed: dict[str, Any] = {"enum": values}
    if form == "const":
        values = values[:1]
        listed = {"const": values[0]}
    elif form == "anyOf":
        listed = {"anyOf": [{"const": value} for value in values]}
    schema: dict[str, Any] = {"properties": {"x": listed}}
    if form == "$ref":
        schema = {"properties": {"x": {"$ref": "#/$defs/d"}}, "$defs": {"d": listed}}
    value = data.draw(st.sampled_from(values))
    for written in {
        value if isinstance(value, str) else json.dumps(value),
        value if isinstance(value, str) else repr(value),
    }:
        got = json.loads(converted(written, types_of(schema, "x"), choices_of(schema, "x")))
        assert any(json.dumps(got) == json.dumps(each) for each in values)
