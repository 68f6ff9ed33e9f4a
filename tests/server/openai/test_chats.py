"""Several conversations in one body: one call and one choice for each, in order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxllm.errors import UnsupportedError, UserError
from jaxllm_server.generation.calls import Chunk, Part, PromptInfo, TokenUsage
from jaxllm_server.openai.chat import ChatReply
from jaxllm_server.openai.chats import ChatsReply
from jaxllm_server.shared.options import ServerOptions

OPTIONS = ServerOptions()
ALPHA = [{"role": "user", "content": "alpha"}]
BETA = [{"role": "user", "content": "beta"}, {"role": "assistant", "content": "gam", "reasoning": "hm"}]
SETTINGS = {
    **{"temperature": 0.5, "max_tokens": 3, "logprobs": True, "seed": 7, "priority": 2, "cache_salt": "s"},
    **{"response_format": {"type": "json_object"}, "chat_template_kwargs": {"a": 1}, "include_reasoning": False},
}


def chats(*conversations, options=OPTIONS, **body):
    return ChatsReply({"messages": list(conversations), **body}, options, "r1")


def chunk(text, ids):
    part = Part(0, text, "", [], ids, None, "stop", None, None)
    return Chunk("r1", [part], PromptInfo([1] * len(ids), 0), TokenUsage(5, len(ids)), None, True)


def test_each_conversation_is_asked_as_it_is_alone() -> None:
    calls = chats(ALPHA, BETA, ALPHA, **SETTINGS).calls
    for number, (call, messages) in enumerate(zip(calls, (ALPHA, BETA, ALPHA), strict=True)):
        (alone,) = ChatReply({"messages": messages, **SETTINGS}, OPTIONS, f"r1-{number}").calls
        assert call == alone
    assert len({id(call.answer_size) for call in calls}) == 1, "the bound is one of the whole answer"


@pytest.mark.parametrize("own", [{}, {"echo": True, "continue_final_message": True, "add_generation_prompt": False}])
@pytest.mark.parametrize("has_ids", [False, True])
def test_choices_are_those_of_the_conversations_alone(own, has_ids) -> None:
    own = {**own, "return_token_ids": has_ids}
    chunks = [chunk("a", [7]), chunk("bc", [8, 9])]
    answer = chats(ALPHA, BETA, **own).response(chunks)
    for number, (choice, messages) in enumerate(zip(answer["choices"], (ALPHA, BETA), strict=True)):
        alone = ChatReply({"messages": messages, **own}, OPTIONS, "r").response([chunks[number]])
        of_prompt = {name: alone[name] for name in ("prompt_logprobs", "prompt_token_ids")}
        assert choice == {**alone["choices"][0], **of_prompt, "index": number}
    assert answer["choices"][1]["message"]["content"] == ("gambc" if "echo" in own else "bc")
    assert answer["usage"] == {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}


@pytest.mark.parametrize(
    ("body", "field", "kind", "text"),
    [
        ({"messages": ALPHA}, "messages", UserError, "a list of conversations"),
        ({"messages": []}, "messages", UserError, "a list of conversations"),
        ({"messages": [ALPHA, []]}, "messages", UserError, r"messages\[1\] must be a list of at least one"),
        ({"messages": [ALPHA, ["a"]]}, "messages", UserError, r"messages\[1\]\[0\] must be an object"),
        ({"messages": [ALPHA] * 5}, "messages", UserError, "at most 4 conversations, got 5"),
        ({"messages": [ALPHA] * 4, "n": 2}, "n", UnsupportedError, "n is not supported"),
        ({"messages": [ALPHA], "stream": True}, "stream", UnsupportedError, "stream is not"),
        ({"messages": [ALPHA], "use_beam_search": True}, "use_beam_search", UnsupportedError, "is not"),
        ({"messages": [ALPHA], "tools": [{}]}, "tools", UnsupportedError, "tools is not"),
        ({"messages": [ALPHA], "prompt_token_ids": [1]}, "prompt_token_ids", UnsupportedError, "is not"),
        ({"messages": [ALPHA], "kv_transfer_params": {"prompt_token_ids": [1]}}, "prompt_token_ids", UserError, "is"),
        ({"messages": [ALPHA], "temprature": 1}, "temprature", UserError, "temperature"),
    ],
)
def test_what_is_refused(body, field, kind, text) -> None:
    with pytest.raises(kind, match=text) as caught:
        ChatsReply(body, replace(OPTIONS, max_prompts=4), "r1")
    assert caught.value.parameter == field


def test_no_more_outputs_than_a_call_may_have() -> None:
    with pytest.raises(UserError, match="number of prompts may be at most 3"):
        chats(ALPHA, ALPHA, ALPHA, ALPHA, options=replace(OPTIONS, max_sequences=3))
