"""Random combinations of sampling parameters: a request returns the same in a busy batch as alone.

In both cases the output satisfies each parameter. 300 of 2,000 combinations are among the default tests, the others
among the slow ones (`make test-slow`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, Logprob, RequestOutput, RequestOutputKind, SamplingParams
from tests.support import paths
from tests.text.test_repetition_detector import repeats

FOLDER = paths.STORIES
BATCH = 100  # concurrent requests: many more than slots
BATCHES = [pytest.param(start, marks=[pytest.mark.slow] * (start >= 100)) for start in range(0, 2000, BATCH)]
SHARE = 0.3  # fraction of the parameters that a request sets
VOCABULARY = 512
WORDS = ["the", " the", "was", "a", "she", "He", "and", "to", "t", "e", ".", " day", "Once upon", "little girl"]


def scale(logits: jax.Array, arguments: jax.Array, positions: jax.Array) -> jax.Array:
    del positions
    return logits * arguments[:, :1]


def ban_above(logits: jax.Array, arguments: jax.Array, positions: jax.Array) -> jax.Array:
    del positions
    return jnp.where(jnp.arange(logits.shape[-1]) > arguments[:, :1], -jnp.inf, logits)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        str(FOLDER),
        max_num_seqs=16,
        max_num_batched_tokens=64,
        block_size=4,
        num_kv_blocks=40,  # too few for 16 requests, so that some are preempted
        max_logprobs=-1,
        logits_processors=[scale, ban_above],
        precompile="covering",
    ) as llm:
        yield llm


@dataclass
class Told:
    """All outputs of one sample, joined."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seed: int | None = None


@dataclass
class Answer:
    """All outputs of a request, joined by sample."""

    samples: dict[int, Told] = field(default_factory=dict)
    prompt_ids: Sequence[int] = ()
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_outputs: int = 0

    def add(self, output: RequestOutput, kind: RequestOutputKind) -> None:
        self.num_outputs += 1
        self.prompt_ids = output.prompt_token_ids
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        for part in output.outputs:
            told = self.samples.setdefault(part.index, Told())
            if kind is not RequestOutputKind.DELTA:
                told = self.samples[part.index] = Told()
            told.token_ids += part.token_ids
            told.text += part.text
            if part.logprobs is not None:
                told.logprobs = [*(told.logprobs or []), *part.logprobs]
            told.finish_reason, told.stop_reason, told.seed = part.finish_reason, part.stop_reason, part.seed


FLAGS = {own.name: not own.default for own in dataclasses.fields(SamplingParams) if str(own.type).startswith("bool")}


def random_values(random: np.random.Generator, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Return a value for every parameter; the caller uses some of them."""

    def ids(most: int) -> list[int]:
        return random.integers(3, vocabulary, random.integers(1, most + 1)).tolist()

    def words(most: int) -> list[str]:
        return random.choice(WORDS, random.integers(1, most + 1)).tolist()

    longest = int(random.integers(1, 5))
    return {
        "n": int(random.integers(1, 4)),
        "presence_penalty": float(random.uniform(-2, 2)),
        "frequency_penalty": float(random.uniform(-2, 2)),
        "repetition_penalty": float(random.uniform(0.7, 1.5)),
        "temperature": float(random.choice([0.0, 0.5, 1.0, 3.0])),
        "top_p": float(random.uniform(0.3, 1.0)),
        "top_k": int(random.integers(1, 40)),
        "min_p": float(random.uniform(0, 0.2)),
        "seed": int(random.integers(-(2**63), 2**63)),
        "stop": words(3),
        "stop_token_ids": ids(20),
        **FLAGS,
        "max_tokens": int(random.choice([1, 5, 13, 30])),
        "min_tokens": int(random.integers(0, 8)),
        "logprobs": int(random.choice([-1, 0, 1, 5, 25])),
        "prompt_logprobs": int(random.choice([0, 2, 25])),
        "logprob_token_ids": ids(6),
        "logit_bias": {token: float(random.uniform(-5, 5)) for token in ids(30)},
        "allowed_token_ids": ids(60),
        "bad_words": words(5),
        "extra_args": {
            "scale": float(random.uniform(0.5, 2)),
            "ban_above": [int(random.integers(3 * vocabulary // 5, vocabulary))],
        },
        "repetition_detection": {"max_pattern_size": longest, "min_count": int(random.integers(2, 4))},
        "truncate_prompt_tokens": int(random.integers(1, 30)),
        "skip_reading_prefix_cache": bool(random.integers(2)),
        "output_kind": RequestOutputKind(int(random.integers(3))),
        "stream_interval": int(random.integers(1, 5)),
    }


def combination(number: int, vocabulary: int = VOCABULARY) -> SamplingParams:
    random = np.random.default_rng(number)
    values = random_values(random, vocabulary)
    used = {name: value for name, value in values.items() if random.random() < SHARE}
    used.setdefault("seed", number)  # the engine draws a seed otherwise
    used.setdefault("max_tokens", 8)
    if used.get("temperature") == 0.0:
        used.pop("n", None)
    if "stop" in used:
        used.pop("detokenize", None)
    if "min_tokens" in used:
        used["min_tokens"] = min(used["min_tokens"], used["max_tokens"])
    return SamplingParams(**used)


def prompt(number: int) -> list[int]:
    with np.load(FOLDER / "golden.npz") as stored:
        story = [*stored["prompt"].tolist(), *stored["tokens"].tolist()]
    random = np.random.default_rng([number, 1])
    start = 4 * int(random.integers(0, 3))  # few different prefixes, so that requests share blocks
    return story[start : start + int(random.integers(1, 40))]


def run(llm: LLM, numbers: Sequence[int]) -> dict[int, Answer]:
    """Run requests together and collect the outputs of each."""
    params = {str(number): combination(number) for number in numbers}
    answers = {number: Answer() for number in numbers}
    for number in numbers:
        llm.engine.add_request(str(number), {"prompt_token_ids": prompt(number)}, params[str(number)])
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            answers[int(output.request_id)].add(output, params[output.request_id].output_kind)
    return answers


def value_of(entry: Mapping[int, Logprob]) -> list[float]:
    """Return an entry's log-probabilities: the sampled token's, then the others by size, since near ones may swap."""
    values = [told.logprob for told in entry.values()]
    return [*values[:1], *sorted(values[1:])]


def check_equal(number: int, busy: Answer, alone: Answer) -> None:
    assert busy.samples.keys() == alone.samples.keys()
    for index, told in busy.samples.items():
        other = alone.samples[index]
        for name in ("token_ids", "text", "finish_reason", "stop_reason", "seed"):
            assert getattr(told, name) == getattr(other, name), (number, name, combination(number))
        for mine, theirs in zip(told.logprobs or (), other.logprobs or (), strict=True):
            np.testing.assert_allclose(value_of(mine), value_of(theirs), atol=1e-4)
    for mine, theirs in zip(busy.prompt_logprobs or (), alone.prompt_logprobs or (), strict=True):
        np.testing.assert_allclose(
            value_of(mine or {0: Logprob(0.0)}), value_of(theirs or {0: Logprob(0.0)}), atol=1e-4
        )


def check_promises(llm: LLM, params: SamplingParams, answer: Answer) -> None:
    """Check an answer against the definition of each parameter."""
    tokenizer = llm.get_tokenizer()
    assert sorted(answer.samples) == list(range(params.n))
    if params.truncate_prompt_tokens is not None:
        assert len(answer.prompt_ids) <= params.truncate_prompt_tokens
    assert (answer.prompt_logprobs is not None) == (params.prompt_logprobs is not None)
    if answer.prompt_logprobs is not None:
        assert len(answer.prompt_logprobs) == len(answer.prompt_ids) and answer.prompt_logprobs[0] is None
        for token, entry in zip(answer.prompt_ids[1:], answer.prompt_logprobs[1:], strict=True):
            assert entry is not None and next(iter(entry)) == token
            assert len(entry) in (max(1, params.prompt_logprobs or 0), (params.prompt_logprobs or 0) + 1)
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        assert answer.num_outputs == 1
    forbidden = [
        tokenizer.encode(space + word.lstrip(), add_special_tokens=False)
        for word in params.bad_words
        for space in ("", " ")
    ]
    for index, told in answer.samples.items():
        ids, reason = told.token_ids, told.finish_reason
        assert reason in ("stop", "length", "repetition", "error")
        assert reason != "error" or params.allowed_token_ids, "only then nothing may be left to sample"
        assert len(ids) <= (params.max_tokens or 0)
        assert len(ids) == params.max_tokens or reason != "length"
        # A stop id ends the output at the first position where `min_tokens` allows it.
        assert len(ids) >= params.min_tokens or reason == "error"
        own_stops = set(params.stop_token_ids) | (set() if params.ignore_eos else llm.engine.model.eos_ids)
        assert not own_stops & set(ids[:-1])
        assert not own_stops & set(ids[: params.min_tokens])
        assert told.seed == (None if params.temperature == 0 else _seed(params, index))
        if params.allowed_token_ids:
            assert set(ids) <= set(params.allowed_token_ids)
        if params.extra_args and "ban_above" in params.extra_args:
            assert all(token <= params.extra_args["ban_above"][0] for token in ids)  # pyright: ignore
        for word in forbidden:
            assert all(ids[at : at + len(word)] != word for at in range(len(ids))), "a bad word"
        if params.repetition_detection:
            found = [at for at in range(1, len(ids) + 1) if repeats(ids[:at], params.repetition_detection)]
            ends = [at for at in found if at >= params.min_tokens]
            assert not ends or ends[0] == len(ids)
            assert (reason == "repetition") <= bool(ends)
        check_text(tokenizer, params, told)
        check_logprobs(params, told)


def check_text(tokenizer: Any, params: SamplingParams, told: Told) -> None:
    if not params.detokenize:
        assert told.text == ""
    if params.stop and told.finish_reason != "error" and params.min_tokens == 0:
        matched = told.stop_reason if isinstance(told.stop_reason, str) and told.finish_reason == "stop" else None
        text = told.text
        if matched and params.include_stop_str_in_output:
            assert text.endswith(matched)
            text = text[: -len(matched)]
        assert not any(stop in text for stop in params.stop)
    if params.detokenize and not params.stop and told.finish_reason in ("length", "repetition"):
        shown = tokenizer.decode(told.token_ids, params.skip_special_tokens)
        assert told.text.strip() == shown.strip()


def check_logprobs(params: SamplingParams, told: Told) -> None:
    has_any = params.logprobs is not None or params.logprob_token_ids is not None
    assert (told.logprobs is not None) == has_any
    if told.logprobs is None:
        return
    assert len(told.logprobs) == len(told.token_ids)
    count = VOCABULARY if params.logprobs == -1 else params.logprobs or 0
    asked = set(params.logprob_token_ids or ())
    for token, entry in zip(told.token_ids, told.logprobs, strict=True):
        assert next(iter(entry)) == token and asked <= set(entry)
        ranked = [one for one in entry.values() if one.rank is not None]
        assert len(ranked) in (max(1, count), count + 1)
        assert len(entry) <= len(ranked) + len(asked)
        if count == VOCABULARY:
            assert abs(sum(np.exp([one.logprob for one in entry.values()])) - 1) < 1e-4


def _seed(params: SamplingParams, index: int) -> int:
    assert params.seed is not None
    return (params.seed + index + 2**63) % 2**64 - 2**63


def test_every_parameter_takes_part() -> None:
    elsewhere = {"structured_outputs"}  # tested in test_structured_output.py
    names = {own.name for own in dataclasses.fields(SamplingParams)}
    assert set(random_values(np.random.default_rng(0))) == names - elsewhere


@pytest.mark.ci
@pytest.mark.parametrize("start", BATCHES)
def test_a_request_gets_in_a_busy_batch_what_it_gets_alone(llm: LLM, start: int) -> None:
    numbers = range(start, start + BATCH)
    busy = run(llm, numbers)
    for number in numbers:
        check_promises(llm, combination(number), busy[number])
        check_equal(number, busy[number], run(llm, [number])[number])
    assert llm.engine.metrics.compilations_after_ready == 0
    assert llm.engine.metrics.preemptions > 0, "they were not busy"
