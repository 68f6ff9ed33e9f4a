"""The pure mapping of embeddings, classes and scores: bodies become calls or errors that name a field, and JSON."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import UnsupportedError, UserError
from jaxllm_server.openai.pooling import REPLIES, PoolReply
from jaxllm_server.pooling.pool_calls import PoolCall, PoolResult
from jaxllm_server.shared.options import ServerOptions

OPTIONS = ServerOptions(max_pooling_inputs=5)
LABELS = ("dull", "witty\n")
# The smallest valid body of each path.
INPUT, PAIR, RANKED = {"input": "a"}, {"text_1": "a", "text_2": "b"}, {"query": "a", "documents": ["b"]}
LEAST: dict[str, dict[str, Any]] = {"/v1/embeddings": INPUT, "/pooling": INPUT, "/classify": INPUT} | {
    f"{version}/{name}": body
    for name, body, versions in (("score", PAIR, ("", "/v1")), ("rerank", RANKED, ("", "/v1", "/v2")))
    for version in versions
}


def read(path: str, **body: Any) -> PoolReply:
    return REPLIES[path](body, OPTIONS, "r1")


def call_of(path: str, **body: Any) -> PoolCall:
    (call,) = read(path, **body).calls
    return call


def written(reply: PoolReply, *rows: list[float], tokens: int = 3) -> tuple[list[Any], dict[str, Any]]:
    """Return the list of an answer, and the other fields of its body."""
    results = [PoolResult(index, np.array(row, np.float32), tokens) for index, row in enumerate(rows)]
    return [json.loads(item) for item in reply.items(results, LABELS)], reply.tail(results)


def test_every_path_has_a_reply() -> None:
    assert LEAST.keys() == REPLIES.keys()


@pytest.mark.parametrize("path", LEAST)
def test_what_all_calls_have(path: str) -> None:
    own = {"model": "m", "request_id": "mine", "priority": -3, "cache_salt": "s", "truncate_prompt_tokens": 7}
    call = call_of(path, **LEAST[path], **own, user="u", padding="do_not_pad", truncation_side="right")
    assert {name: getattr(call, name) for name in own} == own
    assert call.task == {"/v1/embeddings": "embed", "/pooling": None, "/classify": "classify"}.get(path, "score")
    assert call.add_special_tokens and call.normalize is None
    assert read(path, **LEAST[path]).request_id == "r1" and read(path, **LEAST[path], **own).request_id == "mine"


def test_what_only_some_calls_have() -> None:
    assert call_of("/v1/embeddings", input="a", truncation_side="left").truncation_side == "left"
    own: dict[str, Any] = {"dimensions": "many", "normalize": False, "add_special_tokens": False}
    for path, more in (("/v1/embeddings", {}), ("/pooling", {"task": "score", "use_activation": 0})):
        call = call_of(path, input=["a"], **own, **more)
        assert {name: getattr(call, name) for name in (own | more)} == own | more  # `PoolingParams` validates them
    assert call_of("/classify", input="a", use_activation=False).use_activation is False
    assert call_of("/score", text_1="a", text_2="b", use_activation=False).use_activation is False


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/classify"])
def test_four_forms_of_an_input(path: str) -> None:
    ids = [[1, 2], [3]]
    for value, inputs in (("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), (ids, ids)):
        assert call_of(path, input=value).inputs == inputs


WRONG = [None, [], 3, True, {}, [None], [1.5], [["a"]], [1, "a"], ["a", 1], [True], [1, True], [[1], "a"], [[[1]]]]


@pytest.mark.parametrize("value", [*WRONG, [[1], [True]], ["a"] * 6, [[1]] * 6, [{"text": "a"}]], ids=repr)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/classify"])
def test_other_inputs_are_refused(path: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        read(path, input=value)
    assert caught.value.parameter == "input"


@pytest.mark.parametrize("value", [*WRONG, [1, 2], [{"text": 1}], [{"text": "a", "image": "b"}], ["a"] * 6], ids=repr)
def test_other_texts_are_refused(value: Any) -> None:
    for path, name in (("/score", "text_1"), ("/score", "text_2"), ("/rerank", "query"), ("/rerank", "documents")):
        with pytest.raises(UserError) as caught:
            read(path, **{**LEAST[path], name: value})
        assert caught.value.parameter in (name, "text_1")


def test_texts_that_are_compared_and_what_errors_call_them() -> None:
    both = ("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")
    for one, other in both:
        for first, second, inputs, pairs in (
            ("a", "b", ["a"], ["b"]),
            ("a", ["b", {"text": "c"}], ["a", "a"], ["b", "c"]),
            (["a", "b"], ["c", "d"], ["a", "b"], ["c", "d"]),
        ):
            reply = read("/score", **{one: first, other: second})
            assert (reply.calls[0].inputs, reply.calls[0].pairs) == (inputs, pairs)
            assert (reply.names["inputs"], reply.names["pairs"]) == (one, other)
        for first, second in ((["a", "b"], "c"), (["a", "b"], ["c", "d", "e"])):
            with pytest.raises(UserError) as caught:
                read("/score", **{one: first, other: second})
            assert caught.value.parameter == one
    for body in (
        {},
        {"text_1": "a"},
        {"text_1": "a", "documents": "b"},
        {"text_1": "a", "text_2": "b", "queries": "c"},
    ):
        with pytest.raises(UserError) as caught:
            read("/score", **body)
        assert caught.value.parameter == "text_1"


@pytest.mark.parametrize(
    ("path", "fields", "kind"),
    [
        *((path, {"messages": []}, UnsupportedError) for path in ("/v1/embeddings", "/pooling", "/classify")),
        *((path, {"truncation_side": "left"}, UnsupportedError) for path in LEAST if LEAST[path] is not INPUT),
        *((path, {"truncation_side": "middle"}, UserError) for path in LEAST if LEAST[path] is INPUT),
        *((path, {"truncate_prompt_tokes": 1}, UserError) for path in LEAST),
        *((path, {"priority": "high"}, UserError) for path in LEAST),
        ("/v1/embeddings", {"embed_dtype": "float16"}, UnsupportedError),
        ("/v1/embeddings", {"endianness": "big"}, UnsupportedError),
        ("/v1/embeddings", {"encoding_format": "bytes"}, UserError),
        ("/v1/embeddings", {"use_activation": True}, UserError),
        ("/v1/embeddings", {"temperature": 1.0}, UserError),
        ("/pooling", {"task": "token_embed"}, UserError),
        ("/classify", {"dimensions": 3}, UserError),
        ("/score", {"max_tokens_per_doc": 3}, UnsupportedError),
        ("/v2/rerank", {"max_tokens_per_doc": 3}, UnsupportedError),
        ("/v1/rerank", {"rank_fields": ["title"]}, UnsupportedError),
        ("/rerank", {"top_n": -1}, UserError),
        ("/rerank", {"top_n": True}, UserError),
        ("/rerank", {"return_documents": 1}, UserError),
    ],
    ids=str,
)
def test_what_is_refused_by_name(path: str, fields: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        read(path, **LEAST[path], **fields)
    assert (type(caught.value), caught.value.parameter) == (kind, *fields)  # type: ignore[attr-defined]


FLOATS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9)


@settings(deadline=None)
@given(FLOATS)
def test_numbers_are_read_as_they_were(row: list[float]) -> None:
    exact = np.array(row, np.float32)
    (as_text,), _ = written(read("/v1/embeddings", input="a"), row)
    assert np.array_equal(np.array(as_text["embedding"], np.float32), exact)
    (as_bytes,), _ = written(read("/v1/embeddings", input="a", encoding_format="base64"), row)
    assert base64.b64decode(as_bytes["embedding"]) == exact.astype("<f4").tobytes()


def test_the_forms_of_answers() -> None:
    usage = {"usage": {"prompt_tokens": 6, "total_tokens": 6}}
    rows = [0.5, -1.0], [0.25, 2.0]
    for path, name, key in (("/v1/embeddings", "embedding", "embedding"), ("/pooling", "pooling", "data")):
        items, tail = written(read(path, input=["a", "b"]), *rows)
        assert items == [{"index": i, "object": name, key: list(row)} for i, row in enumerate(rows)] and tail == usage
    items, tail = written(read("/classify", input=["a", "b"]), [0.75, 0.25], [0.25, 0.75])
    assert items == [
        {"index": 0, "label": "dull", "probs": [0.75, 0.25], "num_classes": 2},
        {"index": 1, "label": "witty\n", "probs": [0.25, 0.75], "num_classes": 2},
    ]
    items, tail = written(read("/score", text_1="a", text_2=["b", "c"]), [0.5], [2.0])
    assert items == [{"index": 0, "object": "score", "score": 0.5}, {"index": 1, "object": "score", "score": 2.0}]
    assert tail == usage


def test_documents_come_by_their_relevance() -> None:
    documents = ["first", {"text": 'sec"ond'}, "third", "as good as the first"]
    rows = [0.5], [-1.0], [2.0], [0.5]
    reply = read("/v2/rerank", query={"text": "q"}, documents=documents)
    assert reply.list_name == "results"
    items, tail = written(reply, *rows)
    assert [item["index"] for item in items] == [2, 0, 3, 1]
    assert items[-1] == {"index": 1, "document": {"text": 'sec"ond'}, "relevance_score": -1.0}
    assert tail["usage"]["total_tokens"] == 12 and tail["meta"]["billed_units"] == {"search_units": 1}
    items, tail = written(read("/rerank", query="q", documents=documents, top_n=2, return_documents=False), *rows)
    assert items == [{"index": 2, "relevance_score": 2.0}, {"index": 0, "relevance_score": 0.5}]
    assert tail["usage"]["total_tokens"] == 12  # of all results, not only the returned ones


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "a", ""]), inner, max_size=3),
)
FIELDS = (
    "input model task encoding_format dimensions normalize priority text_1 text_2 queries documents query top_n "
    "return_documents request_id user messages x add_special_tokens"
).split()


@settings(deadline=None)
@given(st.sampled_from(sorted(LEAST)), st.booleans(), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_body_is_a_call_or_an_error_that_names_a_field(path: str, is_good: bool, body: dict[str, Any]) -> None:
    try:
        reply = read(path, **(LEAST[path] if is_good else {}) | body)
    except UserError as error:
        assert error.parameter
        return
    (call,) = reply.calls
    assert 1 <= len(call.inputs) <= OPTIONS.max_pooling_inputs
    assert call.pairs is None or len(call.pairs) == len(call.inputs)
    items, _ = written(reply, *[[0.25, 0.5]] * len(call.inputs))
    assert all(math.isfinite(item["index"]) for item in items)
