"""Checks of `Serving` before a call reaches the engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.embedded import MODEL_DIR
from jaxllm.errors import ContextLengthError, NotFoundError, UserError
from jaxllm.sampling_params import SamplingParams
from jaxllm.text import fill_in_middle
from jaxllm.text.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from jaxllm_server.generation.calls import Call
from jaxllm_server.serving import Serving
from jaxllm_server.shared.options import ServerOptions
from tests.server.generation.test_forced_calls import FakeEngine, answer
from tests.support.tokenizer_kinds import build
from tests.text.template_families import FAMILIES

TOKENIZER = load_tokenizer(MODEL_DIR)
TEXT = "Once upon a time there was a fox. "


def serving(model: str = "some/model", **options: Any) -> Serving:
    info = SimpleNamespace(
        tokenizer=SimpleNamespace(has_chat_template=False, confined=None),
        max_model_len=64,
        processor=None,
        sources=None,
    )
    engine: Any = SimpleNamespace(config=EngineConfig(model=model), model=info)
    return Serving(engine, ServerOptions(**options))


def test_answers_give_the_first_name_whichever_was_asked_for() -> None:
    own = serving(served_model_name=("first", "second"))
    assert [own.check_model(name) for name in ("", "first", "second")] == ["first"] * 3
    with pytest.raises(NotFoundError):
        own.check_model("some/model")
    assert serving().check_model("some/model") == "some/model"


def test_a_conversation_without_a_template_is_refused_in_words_of_both_protocols() -> None:
    with pytest.raises(UserError) as caught:
        asyncio.run(serving().prompt_of(Call(messages=[{"role": "user", "content": "a"}])))
    assert caught.value.parameter == "messages"
    assert all(word in str(caught.value) for word in ("/v1/completions", "gRPC", "--chat-template"))
    assert "generate()" not in str(caught.value)


def test_without_a_tokenizer_an_echo_is_empty_as_every_text_is() -> None:
    async def health() -> None:
        pass

    own = serving()
    own.engine.check_health = health
    own.engine.model = SimpleNamespace(
        tokenizer=NoTokenizer("a"), max_model_len=64, vocab_size=16, processor=None, sources=None
    )
    assert asyncio.run(own.echo([1, 2], "", "")) == "" and asyncio.run(own.echo("ab", "", "")) == "ab"
    with pytest.raises(UserError, match="use token ids"):
        asyncio.run(own.tokenize(Call(prompt="ab")))


def prompt_of(call: Call, tokenizer: Any = TOKENIZER, **sampling: Any) -> list[int]:
    """Return the engine's prompt; the fake engine has threads for long texts."""

    async def off_loop(function: Any, *arguments: Any, client: str, language: bytes | None) -> Any:
        return await asyncio.to_thread(function, *arguments)

    own = serving()
    own.engine.off_loop = off_loop
    own.engine.model = SimpleNamespace(
        tokenizer=tokenizer, max_model_len=64, vocab_size=1536, processor=None, sources=None
    )
    return list(asyncio.run(own.prompt_of(call, SamplingParams(**sampling)))["prompt_token_ids"])


@pytest.mark.parametrize("text", [TEXT * 3, TEXT * 500])
def test_the_first_tokens_stay_where_the_right_side_is_cut(text: str) -> None:
    ids = TOKENIZER.encode(text)
    chat = TOKENIZER.encode_chat([{"role": "user", "content": TEXT}])[1]
    for kept, most in ((9, 9), (-1, 64 - 16)):
        own: dict[str, Any] = {"truncate_prompt_tokens": kept}
        for prompt in (text, ids):
            assert prompt_of(Call(prompt=prompt, truncation_side="right"), **own) == ids[:most]
            assert prompt_of(Call(prompt=prompt), **own)[-most:] == ids[-most:]
    for call in (Call(messages=[{"role": "user", "content": TEXT}]), Call(messages=[], written_ids=chat)):
        assert prompt_of(replace(call, truncation_side="right"), truncate_prompt_tokens=5) == chat[:5]
        assert prompt_of(replace(call, truncation_side="right"), truncate_prompt_tokens=64) == chat


def test_a_conversation_that_came_as_ids_is_not_written_again() -> None:
    assert prompt_of(Call(messages=[{"role": "user", "content": "a"}], written_ids=[5, 6])) == [5, 6]
    for call, parameter in (
        (Call(messages=[], written_ids=[5] * 64), "prompt"),
        (Call(messages=[], written_ids=[5, 1536]), "prompt"),
        (Call(messages=[], written_ids=[-1]), "prompt"),
        (Call(messages=[], written_ids=[5], tools=[{}]), "tools"),
    ):
        with pytest.raises(UserError) as caught:
            prompt_of(call)
        assert caught.value.parameter == parameter


@pytest.mark.parametrize("before", ["a b", [5, 6], TEXT * 40])
def test_a_hole_is_filled_by_models_that_can(before: Any) -> None:
    backend = build("byte_level")
    backend.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    tokenizer = Tokenizer(backend, {}, {}, "some model")
    call = Call(prompt=before, suffix="the end")
    if len(before) < 100:
        assert prompt_of(call, tokenizer) == fill_in_middle.encode(tokenizer, before, "the end")
    else:
        with pytest.raises(ContextLengthError):
            prompt_of(call, tokenizer)
    with pytest.raises(UserError, match="cannot fill in the middle"):
        prompt_of(replace(call, prompt="a"))


def test_what_ends_a_filled_hole_and_where_written_reasoning_begins() -> None:
    backend = build("byte_level")
    backend.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<think>"])
    engine = FakeEngine()
    engine.model.tokenizer = tokenizer = Tokenizer(backend, {}, {}, "some model")
    engine.model.vocab_size = tokenizer.vocab_size
    own = Serving(engine, ServerOptions(reasoning_parser="qwen3"))
    for more, ends in (({}, {5, *fill_in_middle.stop_ids(tokenizer)}), ({"ignore_eos": True}, {5})):
        call = Call(prompt="a", suffix="the", sampling={"stop_token_ids": [5], **more})
        assert answer(own, call).text == engine.said
        assert set(engine.asked[-1].stop_token_ids) == ends
    for text in ("a<think>", "a"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        part = answer(own, Call(messages=[], written_ids=ids))
        assert (part.reasoning, part.text) == ((engine.said, "") if "<" in text else ("", engine.said))


def test_a_call_beside_null_content_reaches_a_template_that_branches_on_it() -> None:
    """A template can branch on null content, and gets the arguments with the client's spelling."""
    tokenizer = Tokenizer(build("byte_level"), {}, {"default": FAMILIES["deepseek_v3"].source}, "t")
    function = {"name": "f", "arguments": '{"a":1}'}
    called = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    call = Call(messages=[{"role": "user", "content": "a"}, called])
    assert '<call>f\n{"a":1}' in tokenizer.decode(prompt_of(call, tokenizer))
    function["arguments"] = '{"a": NaN}'
    with pytest.raises(UserError, match=r"^messages\[1\]\.tool_calls\[0\]\.function\.arguments "):
        prompt_of(call, tokenizer.with_chat_templates({"default": FAMILIES["qwen2.5"].source}))
