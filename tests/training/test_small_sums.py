"""The embedded model adds small numbers without an error, the usual first question to a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from jaxllm import LLM, SamplingParams
from training.questions import Question, small_questions

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("jaxllm-embedded", precompile="covering", max_num_seqs=64, max_model_len=64) as llm:
        yield llm


def wrong(llm: LLM, questions: list[Question], params: SamplingParams) -> list[str]:
    """Return the wrong answers; every question has another seed."""
    every = [dataclasses.replace(params, max_tokens=24, seed=number) for number in range(len(questions))]
    outputs = llm.chat([question.messages for question in questions], every, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    return [text for text, question in zip(texts, questions, strict=True) if text != question.answer]


def test_all_small_sums_are_right(llm: LLM) -> None:
    questions = [question for question in small_questions() if question.kind == "small sums"]
    assert len(questions) == 1900
    assert wrong(llm, questions, SamplingParams(temperature=0)) == []


def test_small_sums_are_right_at_the_temperature_of_the_model(llm: LLM) -> None:
    own = llm.get_default_sampling_params()
    assert 0.4 <= own.temperature < 1
    questions = small_questions(first=1)[::2]
    assert len(wrong(llm, questions, own)) <= len(questions) // 100
