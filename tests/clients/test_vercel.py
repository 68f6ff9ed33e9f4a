"""Vercel's AI SDK, with its providers for servers like OpenAI's, for OpenAI (Responses), for Anthropic (Messages)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tests.clients.common import ANSWER, ASKED, SUM, TEXTS, Person, Site, check_node_tools, is_person, node

SCRIPT = "vercel.mjs"


def check(site: Site, provider: str = "") -> None:
    """Check texts, whole and streamed, and objects."""
    whole, streamed = (node(SCRIPT, f"{what}{provider}", site.api, site.model, SUM) for what in ("chat", "stream"))
    assert ANSWER in whole and whole == streamed
    made = node(SCRIPT, f"structured{provider}", site.api, site.model, ASKED)
    assert len(made) == 2 and all(is_person(Person(**each)) for each in made)


def test_chat(site: Site) -> None:
    assert ANSWER in node(SCRIPT, "chat", site.api, site.model, SUM)


def test_stream(site: Site) -> None:
    assert ANSWER in node(SCRIPT, "stream", site.api, site.model, SUM)


def test_tools(tools_site: Site) -> None:
    check_node_tools(SCRIPT, "tools", tools_site.api, tools_site.model)


def test_tools_that_are_forced(site: Site) -> None:
    assert is_person(Person(**node(SCRIPT, "forced", site.api, site.model, ASKED)))


def test_structured_output(site: Site) -> None:
    made = node(SCRIPT, "structured", site.api, site.model, ASKED)
    assert len(made) == 2 and all(is_person(Person(**each)) for each in made)


def test_embeddings(embedder: Site, embeddings: Any) -> None:
    found = node(SCRIPT, "embeddings", embedder.api, embedder.model, json.dumps(TEXTS))
    assert np.allclose(found, embeddings, atol=1e-6)


def test_responses(site: Site) -> None:
    check(site, "-openai")


def test_responses_call_tools(tools_site: Site) -> None:
    check_node_tools(SCRIPT, "tools-openai", tools_site.api, tools_site.model)


def test_messages(site: Site) -> None:
    check(site, "-anthropic")


def test_messages_call_tools(tools_site: Site) -> None:
    check_node_tools(SCRIPT, "tools-anthropic", tools_site.api, tools_site.model)
