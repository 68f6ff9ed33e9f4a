"""Instructor, which only makes objects: through tool calls and through schemas, over all three APIs."""

from __future__ import annotations

from typing import Any

import anthropic
import instructor
import openai
import pytest

from tests.clients.common import ASKED, KEY, MESSAGES, Anything, Person, Site, is_person


def maker(site: Site, mode: str) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=site.api, api_key=KEY), mode=instructor.Mode[mode])


@pytest.fixture
def ask(site: Site) -> dict[str, Any]:
    return {"model": site.model, "messages": MESSAGES, "max_retries": 0, "temperature": 0}


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_structured_output(site: Site, mode: str, ask: dict[str, Any]) -> None:
    assert is_person(maker(site, mode).create(**ask, response_model=Person))


def test_structured_output_of_any_form(long_site: Site, closing: dict[str, int]) -> None:
    asked: Any = {"model": long_site.model, "messages": MESSAGES, "max_retries": 0, "max_tokens": 400}
    made = maker(long_site, "JSON").create(**asked, response_model=Anything, logit_bias=closing)
    assert isinstance(made, Anything)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_stream_of_an_object(site: Site, mode: str, ask: dict[str, Any]) -> None:
    *_, last = maker(site, mode).create_partial(**ask, response_model=Person)
    assert is_person(Person(**last.model_dump()))


def test_responses(site: Site) -> None:
    asked: Any = {"model": site.model, "input": ASKED, "max_retries": 0, "temperature": 0}
    assert is_person(maker(site, "RESPONSES_TOOLS").responses.create(**asked, response_model=Person))


def test_messages(site: Site) -> None:
    client = anthropic.Anthropic(base_url=site.http, api_key=KEY)
    made = instructor.from_anthropic(client, mode=instructor.Mode.ANTHROPIC_TOOLS)
    asked: Any = {"model": site.model, "messages": MESSAGES, "max_retries": 0, "max_tokens": 100}
    assert is_person(made.create(**asked, response_model=Person))
