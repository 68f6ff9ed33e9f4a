"""Items of an output: texts before, between and after calls."""

from __future__ import annotations

import pytest

from jaxllm_server.parsers.tool_parsers import ToolCallDelta
from jaxllm_server.responses.output import Output

CASES = [
    ([" ", "", "\n"], ["function_call"]),  # whitespace alone, as models write it around calls
    (["a", "", "\n"], ["a", "function_call", "\n"]),  # kept, because it belongs to the text
    (["a", "", "\n", "b"], ["a", "function_call", "\nb"]),
    ([" ", "\n"], [" \n"]),  # the only content
    ([" ", "\n", "a"], [" \na"]),
    (["", "", "a"], ["function_call", "function_call", "a"]),
]


@pytest.mark.parametrize(("pieces", "items"), CASES, ids=str)
def test_space_is_a_message_only_with_text(pieces: list[str], items: list[str]) -> None:
    """An empty piece is a call after a tag; each piece has one log-probability."""
    output = Output("r1")
    for number, text in enumerate(pieces):
        entry = {"token": text or "call"}
        if not text:
            output.add("", "", [], [{"token": "<tag>"}])
        output.add("", text, [] if text else [ToolCallDelta(number, f"c{number}", "add", "{}")], [entry])
    output.end(is_whole=True)
    made = output.items()
    assert [item["content"][0]["text"] if "content" in item else item["type"] for item in made] == items
    for item in made:
        if "content" in item:
            (part,) = item["content"]
            assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
