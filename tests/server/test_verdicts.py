"""Python, gRPC and HTTP accept and refuse the same values, and use the same defaults.

A verdict is "accepted" or the name of the refused parameter. Values that a protocol cannot represent (NaN in JSON, 2^64
or a text in a protobuf integer) are refused by the client library. One engine, one server, real clients.

fuzz/test_table checks the tables of values over all three, test_optimized over a server's protocols.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import httpx
import pytest

from jaxllm import AsyncLLM, Client, SamplingParams, UserError
from jaxllm.config import EngineConfig
from jaxllm.embedded import MODEL_DIR
from jaxllm.sampling_fields import OPENAI, names_in
from jaxllm_server.shared.options import ServerOptions
from tests.support.server_thread import ServerThread
from tests.support.sizes import MANY_SLOTS

pytestmark = pytest.mark.ci  # compiles an engine's programs; fuzz/test_table tests verdicts without one

NAN, INF = math.nan, math.inf
TINY = 5e-324  # the smallest double above zero
ABOVE_1, BELOW_1 = math.nextafter(1.0, 2.0), math.nextafter(1.0, 0.0)
ABOVE_2 = math.nextafter(2.0, 3.0)
HALF_PAIR = "\ud800"  # half of a surrogate pair, which is not text
OTHER_TYPES = ["1", "", [], [1], {}]  # for fields that are one number


def no_change(logits: Any, arguments: Any, positions: Any) -> Any:
    return logits


def no_change_either(logits: Any, arguments: Any, positions: Any) -> Any:
    return logits


SETTINGS = MANY_SLOTS | {"logits_processors": (no_change, no_change_either), "model": str(MODEL_DIR)}
BASE: dict[str, Any] = {"prompt": "Once", "temperature": 1.0, "max_tokens": 2, "seed": 3}
VOCABULARY = 1536  # asserted below


def each(name: str, *values: Any) -> list[tuple[str, Any]]:
    return [(name, value) for value in values]


# Booleans, where HTTP has them.
FLAGS = [
    name
    for name in names_in(SamplingParams, OPENAI).values()
    if str(SamplingParams.__dataclass_fields__[name].type).startswith("bool")
]

# Accepted by all three.
GOOD = [
    *each("temperature", 0, 0.0, -0.0, TINY, 1e-5, 0.005, 1, 2.0, 1e30, 1e39, 1e308),
    *each("top_p", TINY, 0.5, BELOW_1, 1.0, 1),
    *each("top_k", -1, 0, -0, 1, VOCABULARY, 2**31 - 1),
    *each("min_p", 0, -0.0, TINY, BELOW_1, 1),
    *each("presence_penalty", -2, -0.0, TINY, 2.0),
    *each("frequency_penalty", -2.0, -0.0, TINY, 2),
    *each("repetition_penalty", TINY, 1e-30, BELOW_1, 1, 2.0, 1e30, 1e308),
    *each("seed", -(2**63), -1, 0, 2**31, 2**63 - 1),
    *each("n", 1, 2, 16),
    *each("stop", "x", [], ["x"], ["a", "b", "\0", "\uffff"]),
    *each("stop_token_ids", [], [0], [VOCABULARY - 1], [5, 5]),
    *each("max_tokens", 1, 3),
    *each("min_tokens", 0, 1, 2),
    *each("logprobs", 0, 1, 20, True),
    *each("logit_bias", {}, {0: 100}, {5: -100.0, 6: TINY}, {VOCABULARY - 1: 1e308}, {i: 1.0 for i in range(300)}),
    *(pair for name in FLAGS for pair in each(name, True, False)),
    *each("truncate_prompt_tokens", -1, 1, 16),
    *each("stream_interval", 1, 2**31 - 1),
    *each("bad_words", [], ["a"], ["a b", "\n", " c "]),
    *each("allowed_token_ids", [5], [0, VOCABULARY - 1, 5, 5]),
    *each("logprob_token_ids", [5], [VOCABULARY - 1, 0], list(range(128))),
    *each("prompt_logprobs", 0, 1, 20, True),
    *each("repetition_detection", {}, {"max_pattern_size": 1024, "min_pattern_size": 2, "min_count": 2}),
    *each("extra_args", {}, {"no_change": []}, {"no_change": 1, "no_change_either": [0.5] * 8}),
    *each("structured_outputs", {"regex": "[a-z]+"}, {"choice": ["a", "b"]}, {"json_object": True}, {"json": "{}"}),
    *each("structured_outputs", {"json": {"type": "object"}, "disable_any_whitespace": True, "regex": None}),
    *each("structured_outputs", {"grammar": 'start: "a" | "b"'}, {"json": {"enum": [1]}, "whitespace_pattern": " ?"}),
    *each("prompt", "a\0b", "\uffff", "e" + "\u0301" * 100, [0], [VOCABULARY - 1], [5, 6, 7]),
    *each("priority", 0),
    *each("cache_salt", "a", "A-Z_0.9"),
    *each("time_limit", 60, 60.5, 10**9),
]

# Refused by all three, by the field's name.
BAD = [
    *each("temperature", -TINY, -1, NAN, INF, -INF, 2**1024, True, *OTHER_TYPES),
    *each("top_p", 0, -0.0, -0.1, ABOVE_1, NAN, INF, -INF, True, *OTHER_TYPES),
    *each("top_k", -2, 2**31, 2**32, 2**63, 2**64, -(2**31) - 1, 1.0, 0.5, NAN, INF, True, *OTHER_TYPES),
    *each("min_p", -TINY, ABOVE_1, NAN, INF, -INF, False, *OTHER_TYPES),
    *each("presence_penalty", ABOVE_2, -ABOVE_2, NAN, INF, -INF, True, *OTHER_TYPES),
    *each("frequency_penalty", ABOVE_2, -ABOVE_2, NAN, INF, -INF, True, *OTHER_TYPES),
    *each("repetition_penalty", 0, -0.0, -1.0, NAN, INF, -INF, True, *OTHER_TYPES),
    *each("seed", 2**63, 2**64, -(2**63) - 1, 1.0, NAN, True, *OTHER_TYPES),
    *each("n", 0, -1, 16385, 10**6, 2**31, 2**32, 2**63, 2**64, 1.0, NAN, True, *OTHER_TYPES),
    *each("stop", "", [""], ["a", ""], 1, True, [1], [None], [["a"]], {}, HALF_PAIR, ["a", HALF_PAIR]),
    *each("stop_token_ids", [-1], [VOCABULARY], [2**31], [2**32 + 5], [2**63], [2**64], [True], ["1"], [1.0], [None]),
    *each("stop_token_ids", 1, "1", True, {}),
    *each("max_tokens", 0, -1, 2**31, 2**32, 2**63, 2**64, 1.0, NAN, True, *OTHER_TYPES),
    *each("min_tokens", -1, 3, 2**31 - 1, 2**31, 2**63, 2**64, 1.0, True, *OTHER_TYPES),
    *each("logprobs", False, -2, -1, 21, 10**9, 2**31, 2**32, 2**64, 1.0, NAN, *OTHER_TYPES),
    *each("logit_bias", {-1: 1.0}, {VOCABULARY: 1.0}, {2**31: 1.0}, {2**32 + 5: 1.0}, {2**64: 1.0}),
    *each("logit_bias", {5: NAN}, {5: INF}, {5: -INF}, {5: "1"}, {5: True}, {5: None}, {5: []}),
    *each(
        "logit_bias",
        {True: 1.0},
        {1.0: 1.0},
        {"a": 1.0},
        {"": 1.0},
        {i: 1.0 for i in range(301)},
        [],
        [5],
        5,
        "5",
        True,
    ),
    *(pair for name in FLAGS for pair in each(name, 0, 1, 0.0, "true", "false", [], {})),
    *each("truncate_prompt_tokens", 0, -2, 2**31 - 1, 2**31, 2**63, 2**64, 1.0, True, *OTHER_TYPES),
    *each("stream_interval", 0, -1, 2**31, 2**32, 2**64, 1.0, True, *OTHER_TYPES),
    *each("prompt_logprobs", False, -2, -1, 21, 2**31, 2**64, 1.0, "1"),
    *each("allowed_token_ids", [], [-1], [VOCABULARY], [2**64], 5, "5", [True], ["5"], [None]),
    *each("bad_words", [""], [" "], [1], "a", 1, {}, [HALF_PAIR], ["a b c d e f g h i j k l m n o p " * 30]),
    *each("bad_words", ["a"] * 513),
    *each("logprob_token_ids", [], [-1], [VOCABULARY], [2**64], 5, [True], list(range(129)), [5] * 129),
    *each("repetition_detection", 1, "1", [], {"min": 1}, {"max_pattern_size": 1}, {"max_pattern_size": "1"}),
    *each("repetition_detection", {"max_pattern_size": 1025, "min_count": 2}, {"min_pattern_size": 1}),
    *each("repetition_detection", {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}),
    *each("repetition_detection", {"max_pattern_size": -1}, {"max_pattern_size": 2**64}, {"max_pattern_size": True}),
    *each("extra_args", 1, "a", [], {"unknown": 1}, {"no_change": [1.0] * 9}, {"no_change": "1"}, {"no_change": True}),
    *each("extra_args", {"no_change": None}, {"no_change": NAN}, {"no_change": [INF]}, {"no_change": {}}),
    *each("extra_args", {f"unknown{i}": 1 for i in range(32)}),
    *each("structured_outputs", {}, "a", [], 5, {"unknown": 1}, {"json_schema": "{}"}, {"structural_tag": "{}"}),
    *each("structured_outputs", {"regex": ""}, {"regex": 5}, {"regex": HALF_PAIR}, {"grammar": ""}, {"grammar": []}),
    *each("structured_outputs", {"regex": "("}, {"grammar": "start: ("}, {"json": {"type": "x"}}),
    *each("structured_outputs", {"choice": []}, {"choice": [1]}, {"choice": "a"}, {"choice": [""]}, {"json": 5}),
    *each("structured_outputs", {"json": "{"}, {"json": []}, {"json": {}, "regex": "a"}, {"json_object": False}),
    *each("structured_outputs", {"json_object": 1}, {"disable_any_whitespace": True}, {"regex": "a", "begin_after": 1}),
    *each("temperatur", 1.0),
    *each(
        "prompt", [], [-1], [VOCABULARY], [2**31], [2**32 + 5], [2**63], [2**64], [True], [5, True], [1.0], [5, None]
    ),
    *each("prompt", "", [5, None], 5, 1.0, True, {}, HALF_PAIR, "a" + HALF_PAIR + "b"),
    *each("priority", 1, -1, 2**31, 2**63, 2**64, 1.0, True, "1", [], {}),
    *each("cache_salt", "", 1, True, [], {}, HALF_PAIR),
    *each("time_limit", 0, -1.0, 1e9 + 1, 2**1024, NAN, INF, True, *OTHER_TYPES),
]

# Values that are valid separately but not together.
TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"n": 2, "temperature": 0}, "n"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"min_tokens": 1, "stop_token_ids": list(range(5, 5 + 40))}, "stop_token_ids"),
    ({"prompt": [5] * 512, "max_tokens": 1}, "prompt"),
    ({"prompt": "a", "stop": ["a", 1], "temperature": 1.0}, "stop"),
    ({"allowed_token_ids": [2], "min_tokens": 2}, "allowed_token_ids"),  # the end-of-sequence token
    ({"allowed_token_ids": [14, 14], "min_tokens": 2, "stop_token_ids": [14]}, "allowed_token_ids"),
    ({"allowed_token_ids": [16], "bad_words": ["."]}, "allowed_token_ids"),  # the same token
]

# Limits that only a server has: the largest accepted value, and one that is refused by name.
EDGES: list[tuple[str, Any, Any]] = [
    ("n", 128, 129),
    ("stop", ["a"] * 16, ["a"] * 17),
    ("stop", "x" * 256, "x" * 257),
    ("stop", ["x" * 256], ["a", "x" * 257]),
    ("stop_token_ids", list(range(5, 133)), list(range(5, 134))),
    ("allowed_token_ids", [5] * VOCABULARY, [5] * (VOCABULARY + 1)),
    ("request_id", "a" * 128, "a" * 129),
    ("request_id", "Az09._-", "a b"),
    ("request_id", "a", ""),
    ("request_id", "a", "a\n"),
    ("request_id", "a", "é"),
    ("request_id", "a", "a/b"),
    ("request_id", "a", "\0"),
    ("cache_salt", "a" * 128, "a" * 129),
    ("cache_salt", "Az09._-", "a b"),
    ("cache_salt", "a", "\x1b[31m"),
    ("cache_salt", "a", "é"),
]


class Refused(NamedTuple):
    """The verdict on a refused request."""

    parameter: str | None  # None: the form of the request as a whole


Verdict = str | Refused
ACCEPTED = "accepted"


class Clients:
    """Clients of a server over both protocols."""

    def __init__(self, http: str, grpc: str) -> None:
        self.client = Client(grpc, retries=False, timeout=20.0)
        self.http = httpx.Client(base_url=http, timeout=20.0)

    def close(self) -> None:
        self.client.close()
        self.http.close()

    def over_grpc(self, fields: Mapping[str, Any]) -> Verdict:
        """Return the verdict that the client's caller gets."""
        own = dict(fields)
        prompt = own.pop("prompt")
        if "stream_interval" in own:  # of streams only
            return verdict_of(lambda: list(self.client.stream(prompt, **own)))
        return verdict_of(lambda: self.client.generate(prompt, **own))

    def over_http(self, fields: Mapping[str, Any]) -> Verdict:
        """Return the verdict on a body sent unchanged, NaN included."""
        names = {"extra_args": "vllm_xargs"}  # vLLM's name
        body = json.dumps({names.get(name, name): value for name, value in fields.items()}).encode()
        response = self.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        if response.status_code == 200:
            return ACCEPTED
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error"), error
        own = {theirs: ours for ours, theirs in names.items()}
        return Refused(own.get(error["param"], error["param"]))


class Site(ServerThread, Clients):
    """An engine shared by three front ends."""

    def __init__(self) -> None:
        options = ServerOptions(port=0, grpc_port=0, max_queued_requests=1000, log_stats_interval=0.0)
        ServerThread.__init__(self, EngineConfig(**SETTINGS), options)
        Clients.__init__(self, self.url, self.target)

    def close(self) -> None:
        Clients.close(self)
        ServerThread.close(self)

    def over_python(self, fields: Mapping[str, Any]) -> Verdict:
        """Return the verdict for a program that embeds the engine."""
        own = dict(fields)
        prompt, priority = own.pop("prompt"), own.pop("priority", 0)
        limit = own.pop("time_limit", None)
        if "cache_salt" in own:
            prompt = {"prompt": prompt, "cache_salt": own.pop("cache_salt")}

        async def ask(engine: AsyncLLM) -> None:
            async for _ in engine.generate(prompt, SamplingParams(**own), priority=priority, time_limit=limit):
                pass

        return verdict_of(lambda: self.run(ask(self.server.engine)))


def verdict_of(ask: Callable[[], object]) -> Verdict:
    """Return the verdict of a call; raises for anything but an answer or a UserError."""
    try:
        ask()
    except UserError as error:
        return Refused(error.parameter)
    return ACCEPTED


def is_json(value: Any) -> bool:
    """Return whether JSON can represent a value: no NaN, infinities or halves of surrogate pairs."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return False
    return True


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site()
    try:
        yield site
    finally:
        with suppress(TimeoutError):
            site.close()


def test_the_table_is_long_and_about_this_model(site: Site) -> None:
    engine = site.server.engine
    assert len(GOOD) + len(BAD) >= 200
    assert (engine.model.vocab_size, engine.model.max_model_len) == (VOCABULARY, 512)


def test_what_the_context_cannot_hold_is_refused_by_both_protocols(site: Site) -> None:
    """The engine ends such a request at the end of its context; only servers refuse it."""
    for prompt, most in (([5] * 500, 12), ([5], 511)):
        fields = {**BASE, "prompt": prompt, "max_tokens": most, "ignore_eos": False}
        assert [site.over_grpc(fields), site.over_http(fields)] == [ACCEPTED] * 2
        fields["max_tokens"] = most + 1
        assert [site.over_grpc(fields), site.over_http(fields)] == [Refused("max_tokens")] * 2
        assert site.over_python(fields) == ACCEPTED


def test_a_request_that_says_nothing_gets_the_same_everywhere(site: Site) -> None:
    """All protocols apply the same defaults, so the greedy texts are equal."""
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    texts = {
        site.client.generate("Once upon", **asked).text,
        site.http.post("/v1/completions", json={"prompt": "Once upon", **asked}).json()["choices"][0]["text"],
    }

    async def ask(engine: AsyncLLM) -> str:
        async for output in engine.generate("Once upon", SamplingParams(**asked)):
            text = output.outputs[0].text
        return text

    texts.add(site.run(ask(site.server.engine)))
    assert len(texts) == 1 and texts != {""}


def test_log_probabilities_are_the_same_everywhere(site: Site) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "logprobs": 2, "prompt_logprobs": 2}
    asked["logprob_token_ids"] = [7, 5]

    async def ask(engine: AsyncLLM) -> Any:
        async for output in engine.generate("Once upon a", SamplingParams(**asked)):
            last = output
        return last

    python, answer = site.run(ask(site.server.engine)), site.client.generate("Once upon a", **asked)
    streamed = site.client.stream("Once upon a", **asked)
    deltas = list(streamed)
    assert sum(len(delta.logprobs or ()) for delta in deltas) == 3
    for told in (answer, streamed.so_far):
        assert told.logprobs is not None and told.prompt_logprobs is not None and told.prompt_logprobs[0] is None
        assert told.prompt_token_ids == list(python.prompt_token_ids)
        rows = [*zip(python.outputs[0].logprobs, told.logprobs, strict=True)]
        rows += [*zip(python.prompt_logprobs[1:], told.prompt_logprobs[1:], strict=True)]
        for entry, row in rows:
            token, chosen = next(iter(entry.items()))
            assert row is not None and (row.token_id, row.rank, row.text) == (token, chosen.rank, chosen.decoded_token)
            assert row.logprob == pytest.approx(chosen.logprob)
            ranked = {other: each.logprob for other, each in entry.items() if each.rank is not None and each.rank <= 2}
            assert {top.token_id: top.logprob for top in row.top} == pytest.approx(ranked)
        for entry, row in zip(python.outputs[0].logprobs, told.logprobs, strict=True):
            assert row.asked == pytest.approx((entry[7].logprob, entry[5].logprob))

    body = {"prompt": "Once upon a", "echo": True, **asked}
    (choice,) = site.http.post("/v1/completions", json=body).json()["choices"]
    told = choice["logprobs"]["token_logprobs"]
    expected = [next(iter(entry.values())).logprob for entry in python.prompt_logprobs[1:]]
    expected += [next(iter(entry.values())).logprob for entry in python.outputs[0].logprobs]
    assert told[0] is None and told[1:] == pytest.approx(expected)
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert [list(map(int, entry)) for entry in choice["prompt_logprobs"][1:]] == [
        list(entry) for entry in python.prompt_logprobs[1:]
    ]


def test_an_output_that_repeats_itself_ends_everywhere_alike(site: Site) -> None:
    asked: dict[str, Any] = {"max_tokens": 9, "allowed_token_ids": [40]}
    asked["repetition_detection"] = {"max_pattern_size": 2, "min_count": 4}
    answer = site.client.generate("Once", **asked)
    assert (answer.finish_reason, answer.stop_reason, answer.token_ids) == ("repetition", None, [40] * 4)
    (choice,) = site.http.post("/v1/completions", json={"prompt": "Once", **asked}).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")


MASKS: list[dict[str, Any]] = [
    {},
    {"allowed_token_ids": [40]},
    {"allowed_token_ids": [2, 40], "min_tokens": 2},
    {"allowed_token_ids": [5, 40, 1535], "temperature": 2.0},
    {"logit_bias": {5: 100, 6: -100}, "top_k": 1, "temperature": 1.0},
    {"logit_bias": {token: -100 for token in range(200)}, "top_p": 1e-6, "temperature": 0.7},
    {"bad_words": ["a", "the", "e"], "min_p": 1.0, "temperature": 1.0},
    {"min_tokens": 3, "repetition_penalty": 1e30, "presence_penalty": 2.0, "temperature": 1.0},
]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: "-".join(mask) or "none")
def test_log_probabilities_are_probabilities_whatever_is_masked(site: Site, mask: dict[str, Any]) -> None:
    """Strict JSON without infinities; probabilities sum to one at most; the chosen token is always included."""

    def strict(route: str, body: dict[str, Any]) -> dict[str, Any]:
        response = site.http.post(route, json={"max_tokens": 3, "temperature": 0, "seed": 1, **mask, **body})
        assert response.status_code == 200, response.text
        return json.loads(response.content, parse_constant=lambda name: pytest.fail(name))

    def check(chosen: float, told: Mapping[str, float], token: str, count: int) -> None:
        assert told[token] == chosen and len(told) in (max(count, 1), count + 1)
        assert all(-9999.0 <= value <= 0.0 for value in told.values())
        assert sum(map(math.exp, told.values())) <= 1 + 1e-3

    for count in (0, 1, 20):
        body = {"prompt": "Once upon a", "logprobs": count, "echo": True, "return_tokens_as_token_ids": True}
        first, again = (strict("/v1/completions", body)["choices"][0] for _ in range(2))  # the second is cached
        told = first["logprobs"]
        assert again["logprobs"]["token_logprobs"] == pytest.approx(told["token_logprobs"], abs=1e-5)
        assert told["token_logprobs"][0] is None
        for token, chosen, top in zip(
            told["tokens"][1:], told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True
        ):
            check(chosen, {token: chosen} if count == 0 else top, token, count)
        body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": count}
        (choice,) = strict("/v1/chat/completions", {**body, "return_tokens_as_token_ids": True})["choices"]
        for entry in choice["logprobs"]["content"]:
            tops = {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
            assert len(tops) == count
            check(entry["logprob"], {entry["token"]: entry["logprob"], **tops}, entry["token"], count)
    fields = {**BASE, **mask, "max_tokens": 3}
    for name in ("logprobs", "prompt_logprobs"):
        for more in (21, -1, -2):
            asked = {**fields, name: more}
            assert [site.over_python(asked), site.over_grpc(asked), site.over_http(asked)] == [Refused(name)] * 3
