"""The engine end to end on a trained model: the same tokens under all settings, loads and failures."""

from __future__ import annotations

import dataclasses
import gc
import math
import re
import signal
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, AsyncEngineArgs, AsyncLLMEngine, EngineArgs, EngineError, SamplingParams, UserError
from jaxllm.embedded import MODEL_DIR
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.outputs import RequestOutput
from jaxllm.runner.model_runner import StepInFlight
from jaxllm.sampling_params import MAX_REPORTED_TOKENS
from tests.support.inspection import lose_state, named_params_of, set_params
from tests.support.paths import GOLDEN
from tests.support.sizes import FEW_BLOCKS, SHORT_BLOCKS, SLOTS

STORIES = str(GOLDEN / "stories260K")
WIDTH = 64  # width of its hidden states
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, let's go to the park.\" "
    "Lily was sad and didn't know what to do. She said, \"I want to play with your ball, but I can't find it.\""
)
PROMPTS = ["Once upon a time", "Tom had a dog", "Lily and Ben went to the", "One day, a big bear"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=136)


def make(sizes: dict[str, Any] = SLOTS, **settings: Any) -> LLM:
    return LLM(STORIES, **sizes | settings)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


def generate(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make() as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, list[int]]:
    """Return the greedy tokens of each prompt when it is the only request."""
    return {prompt: tokens(generate(llm, prompt, GREEDY))[0] for prompt in PROMPTS}


def test_it_tells_the_story(llm: LLM) -> None:
    (output,) = generate(llm, "Once upon a time", GREEDY)
    assert ("Once upon a time" + output.outputs[0].text).startswith(STORY)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        pytest.param({"enable_prefix_caching": False, "max_num_batched_tokens": 8}, 2, marks=pytest.mark.slow),
        (FEW_BLOCKS, 2),
        pytest.param({"block_size": 1}, 2, marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 512, "max_num_seqs": 64, "block_size": 64}, 16, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 4}, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_settings_do_not_change_the_tokens(settings: dict[str, Any], copies: int, alone: dict[str, list[int]]) -> None:
    with make(**settings) as llm:
        for _ in range(2):  # the second run uses the prefix cache
            assert tokens(generate(llm, PROMPTS * copies, GREEDY)) == list(alone.values()) * copies
        assert (llm.engine.metrics.preemptions > 0) == ("num_kv_blocks" in settings)
        if settings.get("block_size", 16) <= 2:
            assert llm.engine.metrics.cached_tokens > 0


@pytest.mark.ci
def test_steps_in_flight_change_no_token_with_aborts_and_preemption() -> None:
    """Full slots, a small pool, late stops and aborts: the tokens are the same with steps in flight and without."""
    random = np.random.default_rng(4)
    stops: list[dict[str, Any]] = [
        {"stop": ["."]},
        {"stop": ["Lily", "the "]},
        {"stop_token_ids": [*range(300, 330)]},
        {},
    ]
    params = [
        SamplingParams(
            temperature=0.8 * (number % 3 > 0),
            seed=number,
            max_tokens=int(random.integers(1, 60)),
            repetition_penalty=float(random.choice([1.0, 1.2])),
            n=1 + (number % 3 == 2),
            **stops[number % 4],
        )
        for number in range(40)
    ]
    going = {int(name): int(random.integers(1, 40)) for name in random.choice(40, 10, replace=False)}
    told: dict[bool, dict[str, RequestOutput]] = {}
    for is_on in (False, True):
        with make(FEW_BLOCKS, async_scheduling=is_on) as llm:
            engine = llm.engine
            for number, own in enumerate(params):
                engine.add_request(str(number), PROMPTS[number % 4], own)
            ended, num_steps = told.setdefault(is_on, {}), 0
            while engine.has_unfinished_requests():
                outputs = engine.step()
                num_steps += 1
                for name, step in going.items():
                    if step == num_steps and (output := engine.abort_request(str(name))):
                        outputs.append(output)
                ended |= {output.request_id: output for output in outputs if output.finished}
            counts = [output.metrics.num_preemptions for output in ended.values() if output.metrics is not None]
            assert sum(counts) == engine.metrics.preemptions > 0
            assert (
                engine.scheduler.state.pool.num_available == FEW_BLOCKS["num_kv_blocks"]
                and not engine.outputs.sequences
            )
    assert told[True].keys() == told[False].keys() and len(told[True]) == 40
    for name, output in told[True].items():
        for one, other in zip(output.outputs, told[False][name].outputs, strict=True):
            if "abort" in (one.finish_reason, other.finish_reason):
                shorter = min(len(one.token_ids), len(other.token_ids))
                assert one.token_ids[:shorter] == other.token_ids[:shorter]
            else:
                assert (one.token_ids, one.text) == (other.token_ids, other.text)
                assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)


def test_the_next_step_is_on_the_device_before_the_last_one_is_read(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    dispatch, read = llm.engine.runner.dispatch, StepInFlight.result
    monkeypatch.setattr(llm.engine.runner, "dispatch", lambda *given: events.append("start") or dispatch(*given))
    monkeypatch.setattr(StepInFlight, "result", lambda flight: events.append("read") or read(flight))
    generate(llm, "Once upon a time", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert events == ["start", "start", "read", "start", "read", "start", "read", "read"]


def test_a_request_gets_the_same_tokens_alone_and_in_a_crowd(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0.9, seed=1, max_tokens=30),
        SamplingParams(temperature=1.1, seed=2, top_k=20, top_p=0.9, min_p=0.02, max_tokens=25),
        SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=28),
        SamplingParams(temperature=0.0, presence_penalty=0.5, min_tokens=9, max_tokens=20, logprobs=2),
    ]
    together = tokens(generate(llm, PROMPTS * 3, params * 3))
    for index, (prompt, own) in enumerate(zip(PROMPTS, params, strict=True)):
        assert tokens(generate(llm, prompt, own)) == [together[index]]
        assert together[index] == together[index + 4] == together[index + 8]


SAMPLED = [
    SamplingParams(temperature=0.9, seed=1, max_tokens=30),
    SamplingParams(temperature=1.1, seed=2, top_k=20, top_p=0.9, min_p=0.02, max_tokens=30, logprobs=3),
    SamplingParams(temperature=1.2, seed=3, top_p=0.8, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=30),
    SamplingParams(temperature=0.0, logit_bias={300: 4.0}, min_tokens=9, max_tokens=30, logprobs=0),
]
COLLECTIVE = re.compile(r"= (.*?) (all-[a-z]+|collective-permute|reduce-scatter)(?:-start)?\(")


@pytest.mark.ci
@pytest.mark.parametrize("shards", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_shards_change_neither_tokens_nor_logprobs_and_exchange_little(llm: LLM, shards: int) -> None:
    expected = generate(llm, PROMPTS, SAMPLED)
    with make(tensor_parallel_size=shards) as split:
        outputs = generate(split, PROMPTS, SAMPLED)
        programs = split.engine.runner.programs
        texts = {key: programs[key].as_text() for key in programs.covering}
    assert tokens(outputs) == tokens(expected)
    for one, other in zip(outputs, expected, strict=True):
        left, right = one.outputs[0].logprobs or [], other.outputs[0].logprobs or []
        assert len(left) == len(right)
        for mine, other_entry in zip(left, right, strict=True):
            assert list(mine) == list(other_entry)
            for token, entry in mine.items():
                assert entry.rank == other_entry[token].rank
                # Shards sum hidden states in another order; sampling adds no further difference.
                assert entry.logprob == pytest.approx(other_entry[token].logprob, abs=2e-5)
    for key, text in texts.items():
        found = Counter()
        for shapes, kind in COLLECTIVE.findall(text):
            dims = [[int(size) for size in each.split(",") if size] for each in re.findall(r"\[([\d,]*)\]", shapes)]
            numbers = sum(math.prod(size) for size in dims)
            if numbers == key.shape.tokens * WIDTH:
                found[kind, "of layers"] += 1
            elif numbers == key.shape.rows * (MAX_REPORTED_TOKENS + 4):
                found[kind, "of named tokens"] += 1  # logits of the token ids that a request names, each from its shard
            else:
                found[kind, "of sampling"] += 1
                # The likeliest 20 tokens of each shard, instead of a row's 512 logits.
                assert numbers <= key.shape.rows * shards * (1 + 2 * 20), (key, shapes)
        # Two for each of five layers and one for the embedding; of the five in sampling, two are loops of eight.
        of_sampling = {
            ("all-reduce", "of named tokens"): 1,
            ("all-reduce", "of sampling"): 5,
            ("all-gather", "of sampling"): 3,
        }
        assert found == (of_sampling if key.part == "sample" else {("all-reduce", "of layers"): 11}), key


def test_n_samples_share_their_prompt_and_are_those_of_following_seeds() -> None:
    prompt = "Once upon a time there was a little boy who had a red ball and a big dog"
    with make(enable_prefix_caching=False) as llm:
        params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=12)
        (output,) = generate(llm, prompt, params)
        admitted = llm.engine.metrics.computed_tokens
        single = [dataclasses.replace(params, n=1, seed=seed) for seed in (5, 6, 7)]
        assert tokens([output]) == tokens(generate(llm, [prompt] * 3, single))
        assert llm.engine.metrics.computed_tokens - admitted > admitted, "three prompts cost more than a shared one"
    assert [completion.index for completion in output.outputs] == [0, 1, 2]


@pytest.mark.ci
def test_requests_without_a_seed_differ_and_an_engine_seed_repeats_them() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12)
    runs = []
    for seed in (1, 1, 2):
        with make(seed=seed) as llm:
            runs.append(tokens(generate(llm, [PROMPTS[0]] * 2, params)))
    assert runs[0] == runs[1] != runs[2] and runs[0][0] != runs[0][1]


def test_penalties_see_the_tokens_that_the_prefix_cache_supplied(llm: LLM) -> None:
    prompt = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=20)
    llm.reset_prefix_cache()
    first, again = generate(llm, prompt, params), generate(llm, prompt, params)
    assert first[0].num_cached_tokens == 0 and (again[0].num_cached_tokens or 0) >= 16
    assert tokens(first) == tokens(again)


def test_a_bias_holds_for_its_request_alone_in_slots_that_change_hands(llm: LLM) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    always, never = ({"logit_bias": {300: bias}} for bias in (100.0, -100.0))
    (alone,) = tokens(generate(llm, PROMPTS[0], plain))
    banned = dataclasses.replace(plain, logit_bias={alone[0]: -100.0})
    params = [plain, dataclasses.replace(plain, **always), banned] * 9
    outputs = tokens(generate(llm, [PROMPTS[0]] * 27, params))
    assert outputs[0::3] == [alone] * 9
    assert outputs[1::3] == [[300] * 6] * 9
    assert all(alone[0] not in output for output in outputs[2::3])
    assert tokens(generate(llm, PROMPTS[0], dataclasses.replace(plain, **never))) == [alone]
    assert llm.engine.metrics.compilations_after_ready == 0


def test_ends(llm: LLM, alone: dict[str, list[int]]) -> None:
    story = alone["Once upon a time"]

    def end(**params: Any) -> tuple[str, Any, Any, int]:
        (output,) = generate(llm, "Once upon a time", SamplingParams(temperature=0.0, **params))
        done = output.outputs[0]
        return done.text, done.finish_reason, done.stop_reason, len(done.token_ids)

    assert end(max_tokens=3)[1:] == ("length", None, 3)
    assert end(max_tokens=None)[3] == 512 - len(llm.get_tokenizer().encode("Once upon a time"))
    assert end(max_tokens=99, stop="Lily")[:3] == (", there was a little girl named ", "stop", "Lily")
    assert end(max_tokens=99, stop=["played", "in the park."])[:3] == (
        ", there was a little girl named Lily. She loved to play outside ",
        "stop",
        "in the park.",
    )
    at = story.index(story[6])
    assert end(max_tokens=99, stop_token_ids=[story[6]])[1:] == ("stop", story[6], at + 1)
    text, reason, _, count = end(max_tokens=12, min_tokens=12, stop_token_ids=[story[6]])
    assert (reason, count) == ("length", 12) and text
    fresh = [token for token in set(story) if story.index(token) > 20]
    assert end(max_tokens=99, stop_token_ids=[*fresh, 5, 6])[1:3] == ("stop", story[min(map(story.index, fresh))])


BAD = [
    ([], {}, "cannot be empty"),
    ([1, 512], {}, "out of vocabulary"),
    ([-1], {}, "out of vocabulary"),
    ([2**32 + 5], {}, "out of vocabulary"),
    ([1, True], {}, "integer"),
    ([1.5], {}, "integer"),
    ({"prompt": "a", "multi_modal_data": {}}, {}, "multi_modal_data"),
    ({"prompt": "a", "cache_salt": 3}, {}, "cache_salt"),
    ({"prompt": "a", "cache_salt": ""}, {}, "cache_salt"),
    ({"prompt": None}, {}, "text or a list"),
    (3.0, {}, "text or a list"),
    ([1] * 512, {}, "maximum context length is 512 tokens"),
    ("\ud800", {}, "surrogate"),
    ("a", {"stop_token_ids": [512]}, "out-of-vocab"),
]


@pytest.mark.parametrize(("prompt", "params", "message"), BAD, ids=[message for *_, message in BAD])
def test_a_bad_request_is_refused_in_one_line_and_hurts_nobody(
    llm: LLM, alone: dict[str, list[int]], prompt: Any, params: dict[str, Any], message: str
) -> None:
    engine = llm.engine
    engine.add_request("good", PROMPTS[0], GREEDY)
    engine.step()
    with pytest.raises(UserError, match=message) as caught:
        engine.add_request("bad", prompt, SamplingParams(**params))
    assert "\n" not in str(caught.value)
    done = []
    while engine.has_unfinished_requests():
        done = engine.step()
    assert [output.request_id for output in done] == ["good"]
    assert tokens(done) == [alone[PROMPTS[0]]]


@pytest.mark.ci
def test_other_refusals(llm: LLM) -> None:
    with pytest.raises(UserError, match="scheduling_policy"):
        llm.generate(PROMPTS, GREEDY, priority=[0, 1, 0, 0], use_tqdm=False)
    assert not llm.engine.has_unfinished_requests(), "what was added before the refusal is gone"
    with pytest.raises(UserError, match="must be the same"):
        generate(llm, PROMPTS, [GREEDY])
    llm.engine.add_request("twice", "a", GREEDY)
    with pytest.raises(UserError, match="in use"):
        llm.engine.add_request("twice", "a", GREEDY)
    llm.engine.abort_request("twice")
    for priority in ("high", None, float("nan"), True):
        with pytest.raises(UserError, match="priority must be an integer"):
            llm.engine.add_request("wrong", "a", GREEDY, priority=priority)  # pyright: ignore[reportArgumentType]
    for prompt, params in ((5, GREEDY), ("a", {"temperature": 0})):
        with pytest.raises(UserError, match=r"int|SamplingParams"):
            generate(llm, prompt, params)
    for settings, message in [
        ({"blocksize": 3}, "Did you mean 'block_size'"),
        ({"block_size": 0}, "block_size"),
        ({"max_model_len": 513}, "512 positions"),
        ({"kv_cache_memory_bytes": 1}, "max_model_len"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "at least max_num_seqs"),
        ({"device": "gpu"}, "cuda12"),
        ({"tensor_parallel_size": 64}, "device"),
    ]:
        with pytest.raises(UserError, match=message):
            LLM(STORIES, **settings)
    with make(FEW_BLOCKS) as small, pytest.raises(UserError, match="maximum context length is 160 tokens"):
        generate(small, [[5] * 160], SamplingParams(max_tokens=1))


def test_a_higher_priority_is_served_first() -> None:
    with make(FEW_BLOCKS, scheduling_policy="priority") as llm:
        ends: list[str] = []
        for name, token, priority in (("late", 5, 5), ("early", 6, -5), ("middle", 7, 0)):
            prompt = [token] * 150  # more than the pool can hold
            llm.engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=2), priority=priority)
        while llm.engine.has_unfinished_requests():
            ends += [output.request_id for output in llm.engine.step() if output.finished]
    assert ends == ["early", "middle", "late"]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_an_abort_in_any_phase_returns_every_block(llm: LLM, num_steps: int) -> None:
    engine = llm.engine
    num_blocks = engine.scheduler.state.pool.num_blocks
    prompts: list[Any] = [[7] * 150, "Tom had", "Lily"]
    for name, prompt in enumerate(prompts):
        engine.add_request(str(name), prompt, SamplingParams(n=2, max_tokens=9))
    for _ in range(num_steps):
        engine.step()
    assert [output.request_id for output in engine.abort_request(["0", "unknown", "1"])] == ["0", "1"]
    assert engine.abort_request("2") is not None and engine.abort_request("2") is None
    assert not engine.has_unfinished_requests() and engine.step() == []
    assert engine.scheduler.state.pool.num_available == num_blocks and not engine.outputs.sequences


def test_a_step_that_takes_the_cache_with_it_costs_no_token(
    llm: LLM, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calls = llm.engine, 0
    real: Callable[..., Any] = engine.runner.dispatch

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (2, 9, 10, 40):
            lose_state(engine.runner)
            raise RuntimeError("the device said no")
        return real(*arguments)

    monkeypatch.setattr(engine.runner, "dispatch", failing)
    before = engine.metrics.recoveries
    assert tokens(generate(llm, PROMPTS, GREEDY)) == list(alone.values())
    assert engine.metrics.recoveries == before + 4


def test_an_engine_that_fails_again_and_again_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("the device said no")

    monkeypatch.setattr(llm.engine.runner, "dispatch", failing)
    with pytest.raises(EngineError, match="the device said no"):
        generate(llm, PROMPTS, GREEDY)
    monkeypatch.undo()
    assert tokens(generate(llm, "Tom", SamplingParams(max_tokens=1)))


@pytest.mark.ci
def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    with LLM(
        str(GOLDEN / "llama-biased"),
        tokenizer=STORIES,
        precompile="covering",
        max_num_seqs=4,
        max_num_batched_tokens=32,
    ) as llm:
        runner, params = llm.engine.runner, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        expected = tokens(generate(llm, [[5, 6, 7]], params))
        named = named_params_of(runner)
        assert "head" in named.top, "a tied head would poison everybody's logits"
        top = named.top | {"embed": named.top["embed"].at[3].set(np.nan)}
        set_params(runner, named.replace(top=top))
        healthy, scored, poisoned = generate(
            llm, [[5, 6, 7], [5, 3, 7], [5, 3, 7]], [params, replace(params, prompt_logprobs=1), params]
        )
        assert scored.outputs[0].finish_reason == "error" and scored.prompt_logprobs is None
        assert poisoned.outputs[0].finish_reason == "error" and "finite" in str(poisoned.outputs[0].stop_reason)
        assert tokens([healthy]) == expected or 3 in expected[0]
        # Other requests must not read the cache entries of the poisoned prompt, even after the fault is removed.
        set_params(runner, named)
        longer = [5, 3, *range(7, 40)]
        set_params(runner, named.replace(top=top))
        assert generate(llm, [longer], params)[0].outputs[0].finish_reason == "error"
        set_params(runner, named)
        (cured,) = generate(llm, [longer], params)
        assert cured.num_cached_tokens == 0 and cured.outputs[0].finish_reason == "length"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("block_size", "length"),
    [(4, 200), pytest.param(16, 480, marks=pytest.mark.slow), pytest.param(1, 480, marks=pytest.mark.slow)],
)
def test_more_blocks_than_fit_into_a_steps_buffer_are_sent_ahead(block_size: int, length: int) -> None:
    prompts = [[5 + (7 * position + name) % 400 for position in range(length)] for name in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with make(SHORT_BLOCKS, block_size=block_size) as llm:
        chunked = tokens(generate(llm, prompts, params))
        assert tokens(generate(llm, prompts, params)) == chunked, "and from the prefix cache"
    with make() as llm:
        assert tokens(generate(llm, prompts, params)) == chunked


def test_an_interrupt_waits_for_the_end_of_the_step(
    llm: LLM, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "Once upon a time there was a little boy who had a red ball and a big dog"
    llm.reset_prefix_cache()
    expected = tokens(generate(llm, prompt, GREEDY))
    llm.reset_prefix_cache()
    real: Callable[..., Any] = llm.engine.runner.dispatch

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(llm.engine.runner, "dispatch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, prompt, GREEDY)
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    assert not llm.engine.has_unfinished_requests()
    assert tokens(generate(llm, prompt, GREEDY)) == expected, "the blocks of the interrupted step were written"


def test_what_fails_before_a_step_ran_is_not_in_the_prefix_cache(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = "Lily and Ben went to the park with a big dog and a red ball one day"
    llm.reset_prefix_cache()
    expected = tokens(generate(llm, prompt, GREEDY))
    llm.reset_prefix_cache()
    monkeypatch.setattr("jaxllm.engine.engine_core.StepInput", lambda *_: 1 / 0)
    with pytest.raises(EngineError, match="division"):
        generate(llm, prompt, GREEDY)
    monkeypatch.undo()
    (output,) = generate(llm, prompt, GREEDY)
    assert output.num_cached_tokens == 0 and tokens([output]) == expected


@pytest.mark.ci
def test_a_closed_engine_says_so_and_lets_go() -> None:
    llm = make()
    runner = weakref.ref(llm.engine.runner)
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        generate(llm, "Tom", GREEDY)
    del llm
    gc.collect()
    assert runner() is None, "nothing keeps a forgotten engine's memory"


def test_step_shows_text_as_it_grows(llm: LLM) -> None:
    llm.engine.add_request("story", "Once upon a time", SamplingParams(temperature=0.0, max_tokens=20))
    texts = []
    while llm.engine.has_unfinished_requests():
        texts += [output.outputs[0].text for output in llm.engine.step()]
    assert len(texts) == 20 and all(later.startswith(sooner) for sooner, later in pairwise(texts))


@pytest.mark.slow
def test_bfloat16_and_float16_generate(alone: dict[str, list[int]]) -> None:
    for dtype in ("bfloat16", "float16"):
        with make(dtype=dtype) as llm:
            assert tokens(generate(llm, PROMPTS[0], GREEDY))[0][:10] == alone[PROMPTS[0]][:10]


@pytest.mark.ci
def test_an_engine_is_made_of_the_arguments_of_llm() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(STORIES, **SLOTS))
    engine.add_request("1", PROMPTS[0], replace(GREEDY, max_tokens=8))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    with make() as llm:
        (expected,) = llm.generate(PROMPTS[0], replace(GREEDY, max_tokens=8), use_tqdm=False)
    assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids
    engine.close()
    with pytest.raises(UserError, match="Did you mean 'max_num_seqs'"):
        LLMEngine.from_engine_args(max_num_seq=3)
    assert EngineArgs().model == str(MODEL_DIR)
    args = AsyncEngineArgs(model=STORIES, block_size=8)
    assert AsyncLLMEngine.from_engine_args(args).config == args
    with pytest.warns(UserWarning, match="swap_space"):
        assert AsyncLLMEngine(args, swap_space=4).config == args


def test_what_vllms_llm_has_beside_it_is_told(llm: LLM) -> None:
    assert not hasattr(llm, "enqueue") and getattr(llm, "collective_rpc", None) is None
    with pytest.raises(AttributeError, match=r"^jaxllm's LLM has no enqueue: use `llm.engine`"):
        llm.enqueue("a")  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match=r"^'LLM' object has no attribute 'generat'$"):
        llm.generat("a")  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.ci
def test_without_a_tokenizer_ids_come_in_and_go_out(llm: LLM, alone: dict[str, list[int]]) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    with make(skip_tokenizer_init=True) as bare:
        (output,) = generate(bare, [ids], replace(GREEDY, logprobs=1))
        assert (output.outputs[0].token_ids, output.outputs[0].text) == (alone[PROMPTS[0]], "")
        for refused in (
            lambda: generate(bare, PROMPTS[0], GREEDY),
            lambda: generate(bare, PROMPTS[0], replace(GREEDY, truncate_prompt_tokens=8)),
            lambda: generate(bare, [ids], replace(GREEDY, stop="a")),
            lambda: generate(bare, [ids], replace(GREEDY, bad_words=["a"])),
            lambda: bare.chat([{"role": "user", "content": "Hello"}]),
            lambda: bare.get_tokenizer().decode(ids),
        ):
            with pytest.raises(UserError, match="skip_tokenizer_init"):
                refused()


def test_no_prompts_draw_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with make() as llm:
        assert llm.generate([]) == []
        assert capsys.readouterr().err == ""
        llm.generate("Once", replace(GREEDY, max_tokens=1))
        assert "Processed prompts" in capsys.readouterr().err
