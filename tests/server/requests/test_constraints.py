"""`response_format`, `structured_outputs` and vLLM's former names: their meanings, and refused shapes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from jaxllm.errors import UserError
from jaxllm.sampling_params import SamplingParams
from jaxllm.structured_outputs_params import StructuredOutputsParams
from jaxllm_server.openai.chat import ChatReply
from jaxllm_server.openai.completions import CompletionReply
from jaxllm_server.requests.constraints import GUIDED, constraint_of
from jaxllm_server.shared.options import ServerOptions

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def form(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, **fields}}


@pytest.mark.parametrize(
    ("body", "meant"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text", "json_schema": None}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": form()}, {"json": SCHEMA}),
        ({"response_format": form(strict=False, description="b")}, {"json": SCHEMA}),
        ({"response_format": form(strict=True, description=None)}, {"json": SCHEMA}),
        ({"response_format": form(schema=None, json_schema=SCHEMA)}, {"json": SCHEMA}),
        ({"structured_outputs": {"regex": "a", "begin_after": None}}, {"regex": "a"}),
        ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "text"}}, {"choice": ["a"]}),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, ...),
        ({"structured_outputs": {"grammar": 'start: "a"', "whitespace_pattern": " "}}, ...),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, {"json": SCHEMA, "whitespace_pattern": " "}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ],
)
@pytest.mark.filterwarnings("ignore:a client sent")
def test_all_ways_to_say_a_form_mean_the_same_parameter(body: dict[str, Any], meant: Any) -> None:
    meant = body["structured_outputs"] if meant is ... else meant
    wanted = None if meant is None else StructuredOutputsParams(**meant)
    replies: list[Any] = [
        CompletionReply({"prompt": "a", **body}, ServerOptions(), "r"),
        ChatReply({"messages": [{"role": "user", "content": "a"}], **body}, ServerOptions(), "r"),
    ]
    for reply in replies:
        assert SamplingParams(**reply.calls[0].sampling).structured_outputs == wanted


@pytest.mark.parametrize(
    "wanted",
    [
        *("json", [], {}, {"type": 3}, {"type": "jsn"}, {"type": "grammar", "grammar": "a"}),
        *({"type": "json_object", "schema": SCHEMA}, {"type": "text", "json_schema": {}}, {"type": "json_schema"}),
        *({"type": "json_schema", "json_schema": SCHEMA}, {"type": "json_schema", "schema": SCHEMA, "name": "a"}),
        *(form(name=None), form(name=""), form(name=3), form(schema=None), form(schema="{}"), form(schema=True)),
        *(form(json_schema=SCHEMA), form(strict="yes"), form(strict=1), form(description=3), form(more=1)),
    ],
)
def test_other_forms_of_response_format_are_refused_by_name(wanted: Any) -> None:
    with pytest.raises(UserError) as caught:
        constraint_of({"response_format": wanted})
    assert caught.value.parameter == "response_format" and "response_format" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:a client sent")
def test_two_that_say_what_the_output_must_be_are_an_error() -> None:
    own = {"structured_outputs": {"regex": "a"}}
    for body in (
        {"response_format": {"type": "json_object"}, **own},
        {"guided_regex": "a", **own},
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
    ):
        with pytest.raises(UserError, match="give one of them") as caught:
            constraint_of(body)
        assert caught.value.parameter in body
    with pytest.raises(UserError, match="multiple are specified: json, regex"):
        SamplingParams(structured_outputs=(constraint_of({"guided_json": {}, "guided_regex": "a"}) or ("", {}))[1])
    with pytest.raises(UserError, match="only be set by the server") as caught:
        constraint_of({"structured_outputs": {"regex": "a", "begin_after": "b"}})
    assert caught.value.parameter == "structured_outputs"


def test_errors_name_the_field_that_was_given() -> None:
    for body, name in (
        ({"response_format": form()}, "response_format"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"structured_outputs": {"json": SCHEMA}}, None),
        ({"structured_outputs": {"json": SCHEMA}, "response_format": {"type": "text"}}, None),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reply = CompletionReply({"prompt": "a", **body}, ServerOptions(), "r")
        assert reply.names.get("structured_outputs") == name


def test_a_former_name_is_taken_with_a_warning() -> None:
    for name in GUIDED:
        with pytest.warns(UserWarning, match=f"a client sent {name}"):
            constraint_of({name: "a"})
