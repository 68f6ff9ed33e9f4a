"""Unknown fields: jaxllm's fields are never dropped silently, and those of other servers do not break a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import UserError
from jaxllm_server.openai import chat, completions, pooling, tokens
from jaxllm_server.requests.shared_fields import SHARED
from jaxllm_server.requests.unknown_fields import FOREIGN, MEANINGFUL, OF_OTHER_ROUTES, warnings_of
from jaxllm_server.shared.options import ServerOptions


class Route(NamedTuple):
    """A route: its fields, a minimal body, and a function that returns its calls and ignored fields."""

    fields: frozenset[str]
    least: Mapping[str, Any]
    read: Callable[[Mapping[str, Any], str], tuple[Any, Any]]


def replying(make: Callable[..., Any]) -> Callable[[Mapping[str, Any], str], tuple[Any, Any]]:
    def read(body: Mapping[str, Any], policy: str) -> tuple[Any, Any]:
        reply = make(body, ServerOptions(unknown_fields=policy), "r")
        return reply.calls, reply.ignored

    return read


def listing(make: Callable[..., Any]) -> Callable[[Mapping[str, Any], str], tuple[Any, Any]]:
    def read(body: Mapping[str, Any], policy: str) -> tuple[Any, Any]:
        ignored: list[str] = []
        return make(body, policy, ignored), ignored

    return read


MESSAGES = [{"role": "user", "content": "a"}]
_OF_POOLING: Mapping[str, Mapping[str, Any]] = {
    "score": {"text_1": "a", "text_2": "b"},
    "rerank": {"query": "a", "documents": ["b"]},
}
ROUTES: Mapping[str, Route] = {
    "completions": Route(
        frozenset(completions.CompletionReply.fields), {"prompt": "a"}, replying(completions.CompletionReply)
    ),
    "chat": Route(frozenset(chat.ChatReply.fields), {"messages": MESSAGES}, replying(chat.ChatReply)),
    "tokenize": Route(tokens.TEXT_FIELDS, {"prompt": "a"}, listing(tokens.tokenize_call_of)),
    "tokenize a chat": Route(tokens.CHAT_FIELDS, {"messages": MESSAGES}, listing(tokens.tokenize_call_of)),
    "detokenize": Route(frozenset({"model", "tokens"}), {"tokens": [1]}, listing(tokens.detokenize_request_of)),
    **{
        path: Route(frozenset(reply.fields), _OF_POOLING.get(path.rpartition("/")[2], {"input": "a"}), replying(reply))
        for path, reply in pooling.REPLIES.items()
    },
}
OURS = frozenset[str]().union(*(route.fields for route in ROUTES.values()))
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=70).filter(lambda name: name not in OURS)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def test_the_tables_have_every_field_of_every_route_and_no_other() -> None:
    assert OURS - FOREIGN == SHARED | OF_OTHER_ROUTES
    assert FOREIGN & OURS == {"enable_thinking", "think", "thinking"}, "what only a chat has may be ignored elsewhere"
    assert not MEANINGFUL.keys() & (FOREIGN | OURS) and {*MEANINGFUL.values()} <= OURS | {""}


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(ROUTES)),
    st.dictionaries(st.sampled_from(sorted(FOREIGN)), VALUES),
    st.dictionaries(NAMES, VALUES, max_size=16),
)
def test_foreign_fields_break_nothing_and_change_nothing(name: str, foreign: dict, strange: dict) -> None:
    route = ROUTES[name]
    foreign = {field: value for field, value in foreign.items() if field not in route.fields}
    calls, ignored = route.read({**foreign, **route.least}, "warn")
    assert (calls, []) == route.read(route.least, "refuse")
    assert set(ignored) == {field for field, value in foreign.items() if value not in (None, False, "", [], {})}
    line = warnings_of(ignored)
    assert line.isascii() and line.decode().isprintable() and len(line) <= 1024
    # Fields that no API defines are also ignored, or refused by name.
    body = {**strange, **route.least}
    try:
        calls, ignored = route.read(body, "warn")
    except UserError as error:
        assert error.parameter in {field[:64] for field in strange} and len(str(error)) < 300
    else:
        assert calls == route.read({field: body[field] for field in body if field in route.fields}, "refuse")[0]
        assert warnings_of(ignored).decode().isprintable()
        assert len(warnings_of(ignored)) <= 1024
    kept = {field: value for field, value in body.items() if field in route.fields}
    assert route.read({**kept, **foreign}, "ignore") == route.read(kept, "refuse")


@pytest.mark.parametrize("name", ROUTES)
def test_none_of_ours_is_dropped(name: str) -> None:
    """Fields of other routes, and synonyms that constrain the answer, are refused."""
    route = ROUTES[name]
    for field in (OURS - FOREIGN | MEANINGFUL.keys()) - route.fields:
        if field not in ("prompt", "messages"):  # these select the route
            with pytest.raises(UserError) as caught:
                route.read({**route.least, field: "x"}, "warn")
            assert caught.value.parameter == field


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(ROUTES)), st.data())
def test_a_misspelt_field_is_refused(name: str, data: st.DataObject) -> None:
    """With two letters exchanged, or one missing."""
    route = ROUTES[name]
    own = data.draw(st.sampled_from(sorted(field for field in route.fields if len(field) > 3)))
    at = data.draw(st.integers(0, len(own) - 2))
    misspelt = own[:at] + data.draw(st.sampled_from((own[at + 1] + own[at], own[at + 1]))) + own[at + 2 :]
    if misspelt in OURS | FOREIGN | MEANINGFUL.keys():
        return
    for policy in ("refuse", "warn"):
        with pytest.raises(UserError, match="Did you mean") as caught:
            route.read({**route.least, misspelt: None}, policy)
        assert caught.value.parameter == misspelt
    route.read({**route.least, misspelt: "x"}, "ignore")


def test_errors_name_what_was_meant_and_are_bounded() -> None:
    read = ROUTES["completions"].read
    for body, meant in (
        *(({"temprature": 1}, "temperature"), ({"max_new_tokens": 1}, "max_tokens"), ({"grammar": "a"}, "structured")),
        ({"stop_sequences": ["a"]}, "stop"),
    ):
        for policy in ("refuse", "warn"):
            with pytest.raises(UserError, match=f"Did you mean '{meant}") as caught:
                read({"prompt": "a", **body}, policy)
            assert [caught.value.parameter] == [*body]
    with pytest.raises(UserError, match="'messages'"):  # from the other endpoint
        read({"prompt": "a", "messages": MESSAGES}, "warn")
    with pytest.raises(UserError) as caught:
        read({"prompt": "a", "x" * 100_000: 1}, "refuse")
    assert len(str(caught.value)) < 200
    with pytest.raises(UserError, match="at most 16"):
        read({"prompt": "a", **{f"{number}{chr(0x4E00 + number) * 9}": 1 for number in range(17)}}, "warn")
    with pytest.raises(UserError) as caught:
        ServerOptions(unknown_fields="drop")
    assert caught.value.parameter == "unknown_fields"


def test_what_is_refused_says_no_more_than_it_has_to() -> None:
    read = ROUTES["chat"].read
    assert read({"messages": MESSAGES, "grammar": None, "format": "", "images": []}, "warn")[1] == []
    assert read({"messages": MESSAGES, "keep_alive": -1, "top_a": 0.1}, "warn")[1] == ["keep_alive", "top_a"]
    assert warnings_of(["a", "\n\u2028\x7f\ud800"]) == rb"ignored fields: 'a', '\n\u2028\x7f\ud800'"
    with pytest.raises(UserError):
        read({"messages": MESSAGES, "keep_alive": -1}, "refuse")
