"""`@anthropic-ai/sdk`, the npm client."""

from __future__ import annotations

from tests.clients.common import ANSWER, SUM, Site, check_node_tools, node

SCRIPT = "anthropic.mjs"


def test_messages(site: Site) -> None:
    told = node(SCRIPT, "messages", site.http, site.model, SUM)
    assert ANSWER in told["whole"] and told["whole"] == told["streamed"] == told["final"]
    assert told["counted"] == told["used"]


def test_messages_call_tools(tools_site: Site) -> None:
    check_node_tools(SCRIPT, "tools", tools_site.http, tools_site.model)
