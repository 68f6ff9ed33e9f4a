"""`/v1/responses/compact` of generated conversations, and requests that continue from its answers."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import UserError
from jaxllm_server.responses.compaction import CompactionReply
from jaxllm_server.responses.items import items_of, messages_of, num_characters, packed, unpacked
from jaxllm_server.shared.options import ServerOptions
from tests.support.fake_serving import SCRIPT, FakeServing, http_server

SUMMARY = "".join(SCRIPT)


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=60), st.integers(0, 80), st.characters(max_codepoint=126))
def test_a_summary_comes_back_and_what_is_no_summary_is_refused(text: str, at: int, other: str) -> None:
    content = packed(text)
    assert unpacked(content) == text
    changed = content[:at] + other + content[at + 1 :]
    item = {"type": "compaction", "encrypted_content": changed}
    try:
        read = unpacked(changed)
    except ValueError:
        with pytest.raises(UserError, match="not a compaction"):
            items_of([item], "r")
        return
    (kept,) = items_of([item], "r")
    assert messages_of([kept])[0]["content"].endswith(read) and num_characters([kept]) == len(changed)


def conversation(draws: random.Random) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for number in range(draws.randrange(1, 8)):
        kind = draws.choice(["user", "assistant", "system", "call", "reasoning"])
        if kind == "call":
            items.append({"type": "function_call", "call_id": f"c{number}", "name": "add", "arguments": "{}"})
            items.append({"type": "function_call_output", "call_id": f"c{number}", "output": "3"})
        elif kind == "reasoning":
            items.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]})
        else:
            items.append({"role": kind, "content": f"{kind} {number}"})
    return items


def test_generated_conversations_become_their_users_messages_and_a_summary_that_goes_on() -> None:
    draws, fake = random.Random(2), FakeServing()
    with http_server(fake) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}/v1") as http:
        for _ in range(40):
            items = conversation(draws)
            before = http.post("/responses", json={"input": items}).json()["id"] if draws.random() < 0.3 else None
            own = [{"role": "user", "content": "And then?"}] if before else items
            body = {"model": "fake", "input": own} | ({"previous_response_id": before} if before else {})
            made = http.post("/responses/compact", json=body).json()
            call = fake.calls[-1]
            said = [message["content"] for message in call.messages]
            assert "Sum up" in said[-1] and len(said) > (len(own) if before else 1)
            assert call.sampling["max_tokens"] == 16, "a quarter of the context"
            assert call.sampling["temperature"] == 0 and call.sampling["truncate_prompt_tokens"] == -1
            assert (made["object"], made["usage"]["total_tokens"]) == ("response.compaction", 12)
            *users, last = made["output"]
            asked = [item["content"] for item in items if item.get("role") == "user"] + ["And then?"] * bool(before)
            assert [item["content"][0]["text"] for item in users] == asked
            assert last["type"] == "compaction" and unpacked(last["encrypted_content"]) == SUMMARY
            assert http.get(f"/responses/{made['id']}").status_code == 404, "nothing is kept of it"
            following = {"input": [*made["output"], {"role": "user", "content": "Go on."}]}
            answer = http.post("/responses", json=following).json()
            assert answer.get("status") == "completed", answer
            shown = [message["content"] for message in fake.calls[-1].messages]
            assert shown == [*asked, f"Summary of the conversation so far:\n{SUMMARY}", "Go on."]
            again = http.post("/responses/compact", json={"model": "fake", "previous_response_id": answer["id"]}).json()
            kinds = [item["type"] for item in again["output"]]
            assert kinds == ["message"] * (len(asked) + 1) + ["compaction"], "one summary, in place of the first"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"input": "Hi"}, "model"),
        ({"model": "m"}, "input"),
        ({"model": "m", "input": []}, "input"),
        ({"model": "m", "input": 3}, "input"),
        ({"model": "m", "input": "Hi", "tools": []}, "tools"),
        ({"model": "m", "input": "Hi", "instructions": 3}, "instructions"),
        ({"model": "m", "input": [{"type": "compaction", "encrypted_content": "gAAAA"}]}, "input"),
    ],
)
def test_what_cannot_be_compacted(body: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError) as caught:
        CompactionReply(body, ServerOptions(unknown_fields="refuse"), "r")
    assert caught.value.parameter == name and len(json.dumps(str(caught.value))) < 300
