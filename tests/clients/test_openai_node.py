"""`openai`, the npm client."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tests.clients.common import ANSWER, ASKED, SUM, TEXTS, Person, Site, check_node_tools, is_person, node

SCRIPT = "openai.mjs"


def test_chat(site: Site) -> None:
    assert ANSWER in node(SCRIPT, "chat", site.api, site.model, SUM)


def test_stream(site: Site) -> None:
    assert ANSWER in node(SCRIPT, "stream", site.api, site.model, SUM)


def test_tools(tools_site: Site) -> None:
    check_node_tools(SCRIPT, "tools", tools_site.api, tools_site.model)


def test_structured_output(site: Site) -> None:
    assert is_person(Person(**node(SCRIPT, "structured", site.api, site.model, ASKED)))


def test_logprobs(site: Site) -> None:
    tokens = node(SCRIPT, "logprobs", site.api, site.model, SUM)
    assert tokens and all(token["logprob"] <= 0 and len(token["top_logprobs"]) == 2 for token in tokens)


def test_embeddings(embedder: Site, embeddings: Any) -> None:
    found = node(SCRIPT, "embeddings", embedder.api, embedder.model, json.dumps(TEXTS))
    assert np.allclose(found, embeddings, atol=1e-6)


def test_responses(site: Site) -> None:
    told = node(SCRIPT, "responses", site.api, site.model, SUM)
    assert ANSWER in told["whole"] and told["whole"] == told["streamed"] == told["final"]
    assert is_person(Person(**told["parsed"]))


def test_responses_call_tools(tools_site: Site) -> None:
    check_node_tools(SCRIPT, "responses-tools", tools_site.api, tools_site.model)
