"""Log-probabilities of outputs and prompts equal those of transformers, for any batch, caching and chunking.

The golden file of stories260K holds the logits that transformers computed (tests/parity/make_golden.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from jaxllm import LLM, Logprob, RequestOutput, RequestOutputKind, SamplingParams, UserError
from tests.support import paths
from tests.support.sizes import SHORT_BLOCKS

FOLDER = paths.STORIES
TOLERANCE = 1e-4
with np.load(FOLDER / "golden.npz") as stored:
    NUM_PROMPT = len(stored["prompt"])
    TOKENS: list[int] = [*stored["prompt"].tolist(), *stored["tokens"].tolist()]
    LOGITS = stored["logits"].astype(np.float64)
EXACT = LOGITS - np.log(np.exp(LOGITS).sum(-1, keepdims=True))  # [position, V]: of the next token
PROMPT = TOKENS[:50]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(FOLDER), max_logprobs=-1, **SHORT_BLOCKS) as llm:
        yield llm


def ask(llm: LLM, prompt: list[int] = PROMPT, **params) -> RequestOutput:
    given = SamplingParams(**{"temperature": 0, "max_tokens": 4, "ignore_eos": True, **params})
    return llm.generate({"prompt_token_ids": prompt}, given, use_tqdm=False)[0]


def check(entry: dict[int, Logprob], position: int, token: int, count: int) -> None:
    """Compare the entry of the token at `position` with transformers' logits for it."""
    exact = EXACT[position - 1]
    first, *others = entry.items()
    assert first[0] == token and len(entry) in (max(count, 1), count + 1)
    assert first[1].rank == 1 + int((exact > exact[token]).sum())
    for other, told in entry.items():
        assert abs(told.logprob - exact[other]) < TOLERANCE
    likeliest = [other for other, _ in ([first] if len(entry) == count else []) + others]
    assert set(likeliest) == set(np.argsort(-exact)[:count].tolist())
    own = first[1].rank if len(entry) == count else None
    assert [told.rank for _, told in others] == [rank for rank in range(1, count + 1) if rank != own]


@pytest.mark.parametrize("count", [0, 1, 20, 21, 100, -1])
def test_outputs(llm: LLM, count: int) -> None:
    output = ask(llm, logprobs=count, max_tokens=10).outputs[0]
    assert output.token_ids == TOKENS[50:60] and output.logprobs is not None
    for at, entry in enumerate(output.logprobs):
        check(entry, 50 + at, TOKENS[50 + at], EXACT.shape[1] if count == -1 else count)
    together = sum(EXACT[49 + at, TOKENS[50 + at]] for at in range(10))
    assert output.cumulative_logprob == pytest.approx(together, abs=10 * TOLERANCE)


@pytest.mark.parametrize("count", [0, 1, 20, 21, -1])
def test_prompts(llm: LLM, count: int) -> None:
    told = ask(llm, prompt_logprobs=count).prompt_logprobs  # in two chunks; the second run is cached
    assert told is not None and len(told) == len(PROMPT) and told[0] is None
    for position, entry in enumerate(told[1:], 1):
        assert entry is not None
        check(entry, position, PROMPT[position], EXACT.shape[1] if count == -1 else count)


def test_a_cached_prompt_is_computed_again_and_stays_cached(llm: LLM) -> None:
    ask(llm)
    assert ask(llm).num_cached_tokens == 48
    assert ask(llm, prompt_logprobs=0).num_cached_tokens == 0
    assert ask(llm, skip_reading_prefix_cache=True).num_cached_tokens == 0
    assert ask(llm).num_cached_tokens == 48
    output = ask(llm, prompt_logprobs=2, skip_reading_prefix_cache=False)
    assert output.num_cached_tokens == 0 and output.prompt_logprobs is not None, "there is no way around it"


def test_a_prompt_of_one_token_has_none(llm: LLM) -> None:
    assert ask(llm, [5], prompt_logprobs=3).prompt_logprobs == [None]
    assert ask(llm, [5]).prompt_logprobs is None


def test_in_a_busy_batch_and_with_several_samples(llm: LLM) -> None:
    params = [SamplingParams(seed=1, max_tokens=9, prompt_logprobs=3 * (row % 2), n=1 + row % 3) for row in range(12)]
    prompts = [{"prompt_token_ids": TOKENS[: 20 + 4 * row]} for row in range(12)]
    for row, output in enumerate(llm.generate(prompts, params, use_tqdm=False)):
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 20 + 4 * row
        for position, entry in enumerate(output.prompt_logprobs[1:], 1):
            assert entry is not None
            check(entry, position, TOKENS[position], 3 * (row % 2))


def test_asked_ids_come_behind_the_likeliest(llm: LLM) -> None:
    output = ask(llm, logprob_token_ids=[7, TOKENS[50], 3, 7]).outputs[0]
    assert output.logprobs is not None
    assert list(output.logprobs[0]) == [TOKENS[50], 7, 3] and output.logprobs[0][7].rank is None
    for at, entry in enumerate(output.logprobs):
        assert {7, 3, TOKENS[50]} <= set(entry)
        for token, told in entry.items():
            assert abs(told.logprob - EXACT[49 + at, token]) < TOLERANCE


def test_a_stream_of_deltas_has_those_of_the_prompt_once(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=4, prompt_logprobs=1, output_kind=RequestOutputKind.DELTA, ignore_eos=True
    )
    llm.engine.add_request("deltas", {"prompt_token_ids": PROMPT}, params)
    told = []
    while llm.engine.has_unfinished_requests():
        told += [output.prompt_logprobs for output in llm.engine.step()]
    assert len(told) == 4 and told[0] is not None and told[1:] == [None] * 3


def test_nothing_is_compiled_for_them(llm: LLM) -> None:
    ask(llm, prompt_logprobs=-1, logprobs=-1)
    assert llm.engine.metrics.compilations_after_ready == 0


def test_the_bound_is_the_configs() -> None:
    with LLM(str(FOLDER), max_logprobs=25, **SHORT_BLOCKS) as llm:
        assert len(ask(llm, logprobs=25).outputs[0].logprobs[0]) == 25  # pyright: ignore[reportOptionalSubscript]
        for name, kind in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
            with pytest.raises(UserError, match=f"Requested {kind} logprobs of 26, which is greater than"):
                ask(llm, **{name: 26})
            with pytest.raises(UserError, match=rf"{name}=-1 requests the whole vocabulary \(\d+\), but max_logprobs"):
                ask(llm, **{name: -1})
