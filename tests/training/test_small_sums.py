"""What people ask a small model first: sums with a number below ten, as the package's own model answers them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from jaxllm import LLM, SamplingParams
from training import corpus, questions

QUESTIONS = [question for question in questions.small_questions() if question.kind == "small sums"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("jaxllm-embedded", precompile="covering", max_num_seqs=64, max_model_len=64) as llm:
        yield llm


def wrong(llm: LLM, asked: list[questions.Question], params: SamplingParams) -> list[str]:
    """Return the answers that are wrong."""
    every = [dataclasses.replace(params, max_tokens=24, seed=number) for number in range(len(asked))]
    outputs = llm.chat([question.messages for question in asked], every, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    return [text for text, question in zip(texts, asked, strict=True) if text != question.answer]


@pytest.mark.ci
def test_all_small_sums_are_right(llm: LLM) -> None:
    assert len(QUESTIONS) == 1900
    assert wrong(llm, QUESTIONS, SamplingParams(temperature=0)) == []


def test_all_sums_of_two_digits_are_right_in_the_first_phrasing(llm: LLM) -> None:
    asked = [
        questions.Question(
            "sum", [{"role": "user", "content": f"What is {a} + {b}?"}], corpus.sum_answer(a, "+", b)
        )
        for a in range(10)
        for b in range(10)
    ]  # fmt: skip
    assert wrong(llm, asked, SamplingParams(temperature=0)) == []
    drawn = wrong(llm, asked * 3, llm.get_default_sampling_params())
    assert len(drawn) <= 3, drawn
