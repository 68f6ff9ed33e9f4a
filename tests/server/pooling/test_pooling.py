"""A call that embeds, classifies or scores, with a scripted engine: its prompts, their timing, and its cleanup."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config import EngineConfig
from jaxllm.embedded import MODEL_DIR
from jaxllm.engine.model_info import ModelInfo
from jaxllm.errors import (
    ContextLengthError,
    DeadlineError,
    FeatureDisabledError,
    OverloadedError,
    RequestFailedError,
    UnavailableError,
    UserError,
)
from jaxllm.metrics import Load
from jaxllm.model.pooler import Pooler
from jaxllm.outputs import PoolingOutput, PoolingRequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.text import tokenizer
from jaxllm.text.tokenizer import load_tokenizer
from jaxllm_server.access.client_quota import FairAdmission
from jaxllm_server.generation.calls import Call
from jaxllm_server.pooling import pooling
from jaxllm_server.pooling.pool_calls import PoolCall, PoolResult
from jaxllm_server.serving import Serving
from jaxllm_server.shared.options import ServerOptions
from tests.support.pooling_models import bert

SLOTS, LONGEST, VOCABULARY, STEP = 4, 16, 512, 40
CLS, SEP = 1, 2
EMBEDDER, CLASSIFIER, SCORER = (), ("dull", "witty", "odd"), ("relevant",)


class Tokenizer:
    """Tokenize into letters, with BERT's special tokens around them."""

    beginning_of: Any = tokenizer.Tokenizer.beginning_of

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [3 + ord(letter) % 500 for letter in text]
        return [CLS, *ids, SEP] if add_special_tokens else ids

    def encode_first(self, text: str, most: int) -> list[int]:
        return [CLS, *self.encode(text, False)[: most - 2], SEP]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        ids, other = self.encode(first), [*self.encode(second, False), SEP]
        return ids + other, [0] * len(ids) + [1] * len(other)


class Engine:
    """Pool a prompt after a few turns of the loop; record the largest concurrency and the end of each prompt."""

    def __init__(self, labels: tuple[str, ...] | None = EMBEDDER) -> None:
        self.model = ModelInfo(
            tokenizer=Tokenizer(),  # type: ignore[arg-type]
            generation_config={},
            default_params=SamplingParams(),
            eos_ids=frozenset(),
            vocab_size=VOCABULARY,
            max_model_len=LONGEST,
            max_num_batched_tokens=STEP,
            pooler=None if labels is None else Pooler("cls", labels=labels),
            num_token_types=2,
        )
        self.config = EngineConfig(model="some/model")
        self.max_queued_requests = 4 * SLOTS
        self.max_queued_tokens: int | None = None
        self.waiting = 0  # prompts of other calls
        self.open = self.most = self.closed_early = self.num_off_loop = 0
        self.given: list[tuple[Any, Any, str]] = []
        self.options: list[dict[str, Any]] = []
        self.refusals = 0  # calls of `encode` that find the queue full
        self.fails: dict[str, PoolingOutput | Exception] = {}  # by request id

    def get_load(self) -> Load:
        return Load(waiting=self.waiting, max_running=SLOTS)

    async def check_health(self) -> None:
        pass

    @contextmanager
    def preparing(self, num_sequences: int):
        if self.waiting >= 4 * SLOTS:
            raise OverloadedError("The queue is full.", retry_after=1.0)
        yield

    async def off_loop(self, function, *arguments, client=None, language=None):
        self.num_off_loop += 1
        return await asyncio.to_thread(function, *arguments)

    async def encode(self, prompt, params, request_id, **options):
        if self.refusals:
            self.refusals -= 1
            raise OverloadedError("The queue is full.", retry_after=1.0)
        self.open += 1
        self.most = max(self.most, self.open)
        is_through = False
        try:
            self.given.append((prompt, params, request_id))
            self.options.append(options)
            ids = [int(token) for token in prompt["prompt_token_ids"]]
            for _ in range(1 + sum(ids) % 5):
                await asyncio.sleep(0)
            said = self.fails.get(request_id, PoolingOutput(made_of(ids, prompt.get("token_type_ids"), params)))
            if isinstance(said, Exception):
                raise said
            is_through = True
            yield PoolingRequestOutput(request_id, ids, said)
        finally:
            self.open -= 1
            self.closed_early += not is_through


def made_of(ids, types, params) -> np.ndarray:
    """Return numbers that depend on every token, on its position and type, and on the parameters, like a model."""
    seed = hash((tuple(ids), tuple(types or ()), params.use_activation)) % 2**32
    values = np.random.default_rng(seed).normal(size=8 if params.task == "embed" else 3).astype(np.float32)
    values = values[: params.dimensions] if params.task != "score" else values[:1]
    return values / np.linalg.norm(values) if params.normalize else values


def ask(engine: Engine, call: PoolCall, **options: Any) -> dict[int, PoolResult]:
    async def collect() -> list[PoolResult]:
        return [result async for result in Serving(engine, ServerOptions(**options)).pooling.pool(call)]  # type: ignore[arg-type]

    results = asyncio.run(asyncio.wait_for(collect(), 20))
    assert engine.open == 0
    assert len({result.index for result in results}) == len(results)
    return {result.index: result for result in results}


def words(rng: random.Random, count: int) -> list[str]:
    return ["".join(rng.choices("abcdefgh", k=rng.randint(0, 12))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(12))
def test_every_result_is_that_of_its_input_alone(seed: int) -> None:
    """Any number of inputs of any kind: the same numbers as one by one, never more at once than the window."""
    rng = random.Random(seed)
    labels = rng.choice([EMBEDDER, CLASSIFIER, SCORER])
    engine, count = Engine(labels), rng.choice([1, 2, 7, 60])
    inputs: list[Any] = words(rng, count)
    own: dict[str, Any] = {"truncate_prompt_tokens": rng.choice([None, -1, 9])}
    if labels == EMBEDDER:
        own |= {"task": "embed", "dimensions": rng.choice([None, 4]), "normalize": rng.choice([None, False, True])}
    elif labels == SCORER and rng.random() < 0.7:
        inputs = [text[:4] for text in inputs]
        own |= {"task": "score", "pairs": [text[:9] for text in words(rng, count)]}
    if "pairs" not in own:
        inputs = [Tokenizer().encode(text) if rng.random() < 0.5 else text for text in inputs]
    call = PoolCall(inputs=inputs, **own)
    results = ask(engine, call)
    assert sorted(results) == list(range(count))
    assert engine.most <= min(count, 5 * SLOTS // 2)
    lengths = [len(prompt["prompt_token_ids"]) for prompt, _, _ in engine.given]
    assert lengths == sorted(lengths, reverse=True)
    for index, result in results.items():
        pairs = None if call.pairs is None else [call.pairs[index]]
        alone = ask(Engine(labels), replace(call, inputs=[inputs[index]], pairs=pairs))[0]
        assert np.array_equal(result.values, alone.values) and result.prompt_tokens == alone.prompt_tokens
        most = 9 if own["truncate_prompt_tokens"] == 9 else LONGEST
        assert result.values.dtype == np.float32 and result.prompt_tokens <= most


def test_an_embedder_scores_by_cosines_of_texts_that_it_embeds_once() -> None:
    engine, rng = Engine(), random.Random(3)
    texts = words(rng, 40)
    results = ask(engine, PoolCall(task="score", inputs=["a query"] * 40, pairs=texts, request_id="r"))
    assert len(engine.given) == len({"a query", *texts})
    assert all(params.task == "embed" and params.normalize for _, params, _ in engine.given)
    vectors = {text: ask(Engine(), PoolCall(inputs=[text], normalize=True))[0] for text in ("a query", *texts)}
    for index, text in enumerate(texts):
        one, other = vectors["a query"], vectors[text]
        assert results[index].values == pytest.approx([one.values @ other.values], abs=1e-6)
        assert results[index].prompt_tokens == one.prompt_tokens + other.prompt_tokens


def test_what_the_engine_is_told_of_a_call() -> None:
    engine = Engine()
    own: dict[str, Any] = {"client": "c", "client_id": "theirs", "priority": 2, "cache_salt": "salt"}
    ask(engine, PoolCall(inputs=["a", "b"], request_id="r", **own), request_timeout=9.0)
    assert Counter(request_id for _, _, request_id in engine.given) == Counter(["r-0", "r-1"])
    told = engine.options[0]
    assert (told["client"], told["owner"], told["priority"], told["timeout"]) == ("c", "", 2, 9.0)
    assert told["name"].endswith("(theirs)") and {prompt["cache_salt"] for prompt, _, _ in engine.given} == {"salt"}
    ask(engine, PoolCall(inputs=["a"], **own), api_key=("one", "two"))
    assert engine.options[-1]["owner"] == "c" and engine.given[-1][0]["cache_salt"] == "c:salt"
    engine.options.clear()
    for count in (1, 40):  # few urgent texts, and more than half of the slots
        ask(engine, PoolCall(inputs=["a"] * count, client="c", priority=-3), api_key=("one", "two"))
    assert [each["priority"] for each in engine.options] == [-3] + [0] * 40


def test_a_pair_that_is_cut_keeps_the_special_tokens_behind_it() -> None:
    engine = Engine(SCORER)
    ask(engine, PoolCall(task="score", inputs=["ab"], pairs=["cdefgh"], truncate_prompt_tokens=8))
    ((prompt, _, _),) = engine.given
    whole = Tokenizer().encode_pair("ab", "cde")
    assert (prompt["prompt_token_ids"], prompt["token_type_ids"]) == whole


LONG = "a" * LONGEST
BAD: list[tuple[tuple[str, ...], dict[str, Any], type[Exception], str, str]] = [
    (EMBEDDER, {"inputs": []}, UserError, "inputs", "1 to 9"),
    (EMBEDDER, {"inputs": ["a"] * 10}, UserError, "inputs", "1 to 9"),
    (EMBEDDER, {"inputs": ["a", LONG]}, ContextLengthError, "inputs", "Input 1"),
    (EMBEDDER, {"inputs": [LONG]}, ContextLengthError, "inputs", "18 input tokens"),
    (EMBEDDER, {"inputs": ["a", [3, VOCABULARY]]}, UserError, "inputs", "Input 1"),
    (EMBEDDER, {"inputs": [[3, -1], "a"]}, UserError, "inputs", "Input 0"),
    (EMBEDDER, {"inputs": ["a", "b", []]}, UserError, "inputs", "Input 2"),
    (EMBEDDER, {"inputs": ["a", ""], "add_special_tokens": False}, UserError, "inputs", "Input 1"),
    (EMBEDDER, {"inputs": ["a"], "dimensions": 0}, UserError, "dimensions", "dimensions"),
    (
        EMBEDDER,
        {"inputs": ["a"], "truncate_prompt_tokens": LONGEST + 1},
        UserError,
        "truncate_prompt_tokens",
        "greater",
    ),
    (EMBEDDER, {"inputs": ["a"], "truncate_prompt_tokens": 0}, UserError, "truncate_prompt_tokens", "-1"),
    (EMBEDDER, {"inputs": ["a"], "request_id": "a b"}, UserError, "request_id", "characters"),
    (EMBEDDER, {"inputs": ["a"], "cache_salt": "a b"}, UserError, "cache_salt", "characters"),
    (EMBEDDER, {"inputs": ["a"], "model": "other"}, UserError, "model", "some/model"),
    (EMBEDDER, {"inputs": ["a"], "task": "classify"}, FeatureDisabledError, "model", "embeds"),
    (EMBEDDER, {"inputs": ["a"], "use_activation": True}, UserError, "use_activation", "classify"),
    (EMBEDDER, {"inputs": ["a", "b"], "pairs": ["c", LONG], "task": "score"}, ContextLengthError, "pairs", "Input 1"),
    (CLASSIFIER, {"inputs": ["a"], "task": "embed"}, FeatureDisabledError, "model", "classifies"),
    (CLASSIFIER, {"inputs": ["a"], "task": "score", "pairs": ["a"]}, FeatureDisabledError, "model", "classifies"),
    (CLASSIFIER, {"inputs": ["a"], "dimensions": 4}, UserError, "dimensions", "embed"),
    (SCORER, {"inputs": ["a"], "task": "score"}, UserError, "pairs", "two texts"),
    (SCORER, {"inputs": ["a"], "pairs": ["a", "b"], "task": "score"}, UserError, "pairs", "as many"),
    (SCORER, {"inputs": [[3]], "pairs": ["a"], "task": "score"}, UserError, "pairs", "texts"),
    (SCORER, {"inputs": ["a", "b"], "pairs": ["a", LONG], "task": "score"}, ContextLengthError, "inputs", "Input 1"),
    (
        *(SCORER, {"inputs": [LONG], "pairs": ["a"], "task": "score", "truncate_prompt_tokens": 9}),
        *(UserError, "inputs", "first text is never cut"),
    ),
]


@pytest.mark.parametrize(("labels", "fields", "kind", "parameter", "words"), BAD, ids=str)
def test_one_bad_input_fails_a_call_before_anything_is_computed(
    labels: Any, fields: Any, kind: Any, parameter: str, words: str
) -> None:
    engine = Engine(labels)
    with pytest.raises(kind, match=words) as caught:
        ask(engine, PoolCall(**{"task": None, **fields}), max_pooling_inputs=9)
    assert caught.value.parameter == parameter and not engine.given


def test_a_model_that_generates_does_not_pool_and_the_reverse() -> None:
    with pytest.raises(FeatureDisabledError, match="some/model generates text"):
        ask(Engine(None), PoolCall(inputs=["a"]))
    serving: Any = Serving(Engine(), ServerOptions())  # type: ignore[arg-type]
    with pytest.raises(FeatureDisabledError, match="embeds texts and scores pairs of texts; it generates no text"):
        asyncio.run(anext(serving.generate(Call(prompt="a"))))


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (PoolingOutput(np.empty(0), "error", "a step failed"), RequestFailedError, "Input 3: .*a step failed"),
        (PoolingOutput(np.array([1.0, np.nan], np.float32)), RequestFailedError, "Input 3: .*finite"),
        (PoolingOutput(np.empty(0), "abort"), UnavailableError, "aborted"),
        (RequestFailedError("no"), RequestFailedError, "Input 3: no"),
        (UserError("no", "dimensions"), UserError, "Input 3: no"),
        (DeadlineError("late"), DeadlineError, "late"),
    ],
    ids=str,
)
def test_one_failure_ends_the_call_and_aborts_the_others(said: Any, kind: Any, words: str) -> None:
    engine = Engine()
    engine.fails["r-3"] = said
    with pytest.raises(kind, match=words):
        ask(engine, PoolCall(inputs=["abc"] * 50, request_id="r"))
    assert len(engine.given) < 20  # the others never started


async def test_to_close_the_iterator_aborts_what_is_left() -> None:
    engine = Engine()

    serving: Any = Serving(engine, ServerOptions())  # type: ignore[arg-type]
    async with aclosing(serving.pooling.pool(PoolCall(inputs=[*map(chr, range(97, 120))] * 4))) as results:
        await anext(results)
    assert engine.open == 0 and engine.closed_early and len(engine.given) < 30


async def test_a_reader_that_does_not_read_has_no_more_computed() -> None:
    engine = Engine()

    async with aclosing(Serving(engine, ServerOptions()).pooling.pool(PoolCall(inputs=["abcd"] * 999))) as results:  # type: ignore[arg-type]
        await anext(results)
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(engine.given) <= 6 * SLOTS


def test_a_queue_that_is_full_refuses_a_call_and_delays_one_that_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "FULL_SECONDS", 0.01)
    engine = Engine()
    engine.refusals = 40
    assert len(ask(engine, PoolCall(inputs=["a"] * 30))) == 30
    engine.refusals = 10**9
    with pytest.raises(DeadlineError):
        ask(engine, PoolCall(inputs=["a"] * 30), request_timeout=0.05)
    engine.refusals, engine.waiting = 0, 4 * SLOTS
    with pytest.raises(OverloadedError):
        ask(engine, PoolCall(inputs=["a"]))


def test_a_client_has_no_more_at_once_than_its_share() -> None:
    engine = Engine()
    assert len(ask(engine, PoolCall(inputs=["a"] * 30), max_sequences_per_client=3)) == 30
    assert engine.most == 3


PROMPTS = st.tuples(st.sampled_from("abc"), st.integers(1, 30), st.integers(0, 9), st.booleans())


@settings(deadline=None)
@given(st.lists(PROMPTS, max_size=40), st.integers(1, 6), st.integers(1, 60))
def test_places_are_taken_in_turns_within_both_bounds(prompts: list[Any], most: int, most_tokens: int) -> None:
    """Each prompt has a client, tokens and a time, and its reader may leave; at the end no place is held."""
    held: list[int] = []
    waiting: list[tuple[str, int]] = []
    turns: dict[tuple[str, int], Counter[str]] = {}  # places granted while one waited, by client

    async def work(number: int, places: FairAdmission) -> None:
        client, num_tokens, seconds, _ = prompts[number]
        waiting.append((client, number))
        turns[client, number] = Counter()
        try:
            async with places.place(client, num_tokens, most, most_tokens):
                waiting.remove((client, number))
                held.append(num_tokens)
                assert len(held) <= most and (len(held) == 1 or sum(held) <= most_tokens)
                for other in waiting:
                    turns[other][client] += 1
                is_first = all(each != client or other > number for each, other in waiting)
                seen = {each: count for each, count in turns[client, number].items() if each != client}
                ahead = turns[client, number][client]
                assert is_first and all(count <= ahead + 1 + most for count in seen.values())
                try:
                    for _ in range(seconds):
                        await asyncio.sleep(0)
                finally:
                    held.remove(num_tokens)
        finally:
            if (client, number) in waiting:
                waiting.remove((client, number))

    async def play() -> None:
        places = FairAdmission()
        tasks = [asyncio.ensure_future(work(number, places)) for number in range(len(prompts))]
        for task, (_, _, seconds, leaves) in zip(tasks, prompts, strict=True):
            for _ in range(seconds):
                await asyncio.sleep(0)
            if leaves:
                task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [end for end in ends if isinstance(end, AssertionError)]
        assert places.num_taken == places.tokens_taken == 0 and not places.waiting

    asyncio.run(play())


def test_many_calls_at_once_are_all_answered_and_leave_room_for_others() -> None:
    """Calls of hundreds of prompts, which together would fill the queue many times, and small ones between them."""
    engine, rng = Engine(), random.Random(1)
    serving: Any = Serving(engine, ServerOptions())  # type: ignore[arg-type]
    clients = asyncio.Semaphore(12)

    async def call(number: int) -> int:
        async with clients:
            for _ in range(rng.randint(0, 50)):
                await asyncio.sleep(0)
            count = rng.choice([1, 1, 3, 100])
            results = [result async for result in serving.pooling.pool(PoolCall(inputs=words(rng, count)))]
            return len(results) - count

    async def ask_all() -> list[int]:
        return await asyncio.gather(*map(call, range(200)))

    assert asyncio.run(ask_all()) == [0] * 200
    assert engine.most <= 5 * SLOTS  # nothing was refused


@pytest.mark.parametrize(("queued", "most"), [(60, 3), (None, 10)])
def test_prompts_of_many_tokens_are_fewer_at_once(queued: int | None, most: int) -> None:
    engine = Engine()
    engine.max_queued_tokens = queued
    ask(engine, PoolCall(inputs=["a" * 8] * 30))  # of ten tokens: half of the queue holds three, three steps twelve
    assert engine.most == most
    ask(engine, PoolCall(inputs=["a" * 13] * 30))  # of fifteen
    assert engine.most == most


LONG_TEXTS = {
    "words": "ab cde f " * 20_000,
    "one word": "abcdefg" * 20_000,
    "spaces": "ab" + " " * 100_000 + "cd " * 20_000,
    "no tokens": "ab" + "\x01" * 100_000 + "cd " * 20_000,
    "few": "a" + " " * 100_000 + "b",
    "unknown": "日本 " * 20_000,
}


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_of_a_long_text_a_part_is_tokenized_and_says_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = LONG_TEXTS[name]
    for folder in (bert(tmp_path), MODEL_DIR):
        tokenizer, engine, read = load_tokenizer(folder), Engine(), list[int]()
        engine.model = replace(engine.model, tokenizer=tokenizer, vocab_size=10_000)
        whole, first = tokenizer.encode(text), tokenizer.encode_first(text, 9)
        encode = tokenizer.encoding_of

        def noted(text: str, *others: Any, encode: Any = encode, read: list[int] = read, **more: Any) -> Any:
            read.append(len(text))
            return encode(text, *others, **more)

        monkeypatch.setattr(tokenizer, "encoding_of", noted)
        ask(engine, PoolCall(inputs=[text], truncate_prompt_tokens=9))
        assert engine.given[0][0]["prompt_token_ids"].tolist() == first
        if len(whole) > LONGEST:
            with pytest.raises(ContextLengthError) as caught:
                ask(engine, PoolCall(inputs=[text]))
            assert LONGEST < caught.value.num_prompt_tokens <= len(whole)
        else:
            ask(engine, PoolCall(inputs=[text]))
            assert engine.given[1][0]["prompt_token_ids"].tolist() == whole
        if name in ("words", "unknown"):
            assert max(read) < 5_000


def test_long_texts_are_made_ids_in_one_job_beside_the_loop() -> None:
    engine = Engine()
    ask(engine, PoolCall(inputs=["abcdefghij"] * 500))
    assert engine.num_off_loop == 1
    ask(engine, PoolCall(inputs=["abcdefghij"] * 10))
    assert engine.num_off_loop == 1
