"""What `Serving` says of a call before any engine sees it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm.errors import NotFoundError, UserError
from jaxllm_server.shared.calls import Call
from jaxllm_server.shared.options import ServerOptions
from jaxllm_server.shared.serving import Serving


def serving(model: str = "some/model", **options: Any) -> Serving:
    info = SimpleNamespace(tokenizer=SimpleNamespace(has_chat_template=False), max_model_len=64)
    engine: Any = SimpleNamespace(config=SimpleNamespace(model=model), model=info)
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
