"""`StructuredOutputsParams`: accepted values, and the errors for others."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel, TypeAdapter

from jaxllm import SamplingParams, StructuredOutputsParams
from jaxllm.errors import UserError
from jaxllm.structured_outputs_params import MAX_CHARS, MAX_DEPTH


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.parametrize("schema", [Person, TypeAdapter(Person), json.dumps(Person.model_json_schema())])
def test_a_schema_may_be_a_class_or_text(schema: object):
    params = StructuredOutputsParams(json=schema)
    assert params.kind == "json" and json.loads(params.json) == Person.model_json_schema()
    assert SamplingParams(structured_outputs={"json": json.loads(params.json)}).structured_outputs == params


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "You must use one kind of structured outputs constraint but none are specified."),
        ({"json_object": False}, "You must use one kind of structured outputs constraint but none are specified."),
        (
            {"json": {}, "regex": "a"},
            "You can only use one kind of structured outputs constraint but multiple are specified: json, regex.",
        ),
        ({"json": "{"}, "json must be a JSON schema: Expecting property name"),
        ({"json": [1]}, "json must be a JSON schema, got [1]."),
        ({"json": {"const": float("nan")}}, "json must be a JSON schema: Out of range float values"),
        ({"json": nested(MAX_DEPTH + 1)}, "json may be nested at most 64 levels deep."),
        ({"json": nested(3000)}, "json may be nested at most 64 levels deep."),
        ({"json": "[" * 100_000}, "json may be nested at most 64 levels deep."),
        ({"json": {"enum": [0] * MAX_CHARS}}, f"json may have at most {MAX_CHARS} characters."),
        ({"json": {"a": ["b"] * 9 + [[]] * MAX_CHARS}}, f"json may have at most {MAX_CHARS} characters."),
        ({"choice": ["a"] * (MAX_CHARS + 1)}, f"choice must hold at most {MAX_CHARS} strings"),
        ({"regex": ""}, "regex must be a text that is not empty, got ''."),
        ({"regex": 3}, "regex must be a text that is not empty, got 3."),
        ({"regex": "\ud800"}, "regex must be valid Unicode, without half of a surrogate pair."),
        ({"grammar": "a" * (MAX_CHARS + 1)}, f"grammar may have at most {MAX_CHARS} characters, got {MAX_CHARS + 1}."),
        ({"choice": []}, "choice must hold texts that are not empty."),
        ({"choice": "yes"}, "choice must be a list of strings, got 'yes'."),
        ({"choice": ["a", ""]}, "choice must hold texts that are not empty."),
        ({"structural_tag": "{}"}, "structural_tag is not supported by jaxllm yet."),
        ({"json_object": 1}, "json_object must be True or False, got 1."),
        ({"jsn": {}}, "structured_outputs has no 'jsn'; it has json, regex, "),
    ],
)
def test_what_is_wrong_is_said(given: dict, message: str):
    with pytest.raises(UserError) as error:
        SamplingParams(structured_outputs=given)
    assert str(error.value).startswith(message)


def test_the_deepest_schema_is_accepted():
    assert StructuredOutputsParams(json=nested(MAX_DEPTH)).kind == "json"
