"""The split of reasoning and content against `str.partition` of the whole text, at every cut and at great length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm_server.parsers.reasoning import TaggedReasoning
from jaxllm_server.parsers.table import REASONING_PARSERS
from tests.support.linear import pushes_in_linear_time
from tests.support.naive import distinct, split_reasoning

FORMS = {name: REASONING_PARSERS[name].form for name in distinct(REASONING_PARSERS)}
TAGGED = {name: form for name, form in FORMS.items() if isinstance(form, TaggedReasoning)}
CLOSED = "<think></think>"


def _split(style: str, prompt: str, pieces: Sequence[str]) -> tuple[str, str]:
    parser = REASONING_PARSERS[style].form.parser(prompt)
    parts = [*(parser.push(piece) for piece in pieces), parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize("style", TAGGED)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), opens=st.booleans(), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_any_cut_gives_what_the_whole_text_gives(style: str, data: st.DataObject, opens: bool, cuts: list[int]) -> None:
    form = TAGGED[style]
    tags = [*form.starts, *form.ends, *form.kept_ends]
    parts = [*tags, *(tag[:3] for tag in tags), *"</> a\n"]
    text = data.draw(st.lists(st.sampled_from(parts), max_size=10).map("".join))
    prompt = "a\n" + form.starts[0] + "\n" if opens else "a\n"
    expected = split_reasoning(text, opens or style in ("deepseek_r1", "kimi_k2"), form)
    ends = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *ends, len(text)])]
    assert _split(style, prompt, pieces) == expected
    assert _split(style, prompt, list(text)) == expected


# Each: the model's answer to a prompt, its reasoning and its content.
TRANSCRIPTS = [
    ("qwen3", "", "<think>\nSo.\n</think>\n\nYes.", "\nSo.\n", "\n\nYes."),
    ("glm45", "<|assistant|>", "\n<think>So.</think>\nYes.", "So.", "\nYes."),
    ("deepseek_r1", "<｜Assistant｜>", "So.</think>Yes.", "So.", "Yes."),
    ("deepseek_v3", "<｜Assistant｜><think>", "So.</think>Yes.", "So.", "Yes."),
    ("deepseek_v3", "<｜Assistant｜></think>", "Yes.", "", "Yes."),
    ("kimi_k2", "", "<think>So.</think>Yes.", "So.", "Yes."),
    ("kimi_k2", "", "So.<|tool_calls_section_begin|>", "So.", "<|tool_calls_section_begin|>"),
    ("mistral", "", "[THINK]So.[/THINK]Yes.", "So.", "Yes."),
    ("granite", "", "Here is my thought process:\nSo.\n\nHere is my response:\nYes.", "\nSo.\n\n", "\nYes."),
    ("granite", "", "Here's my thought process: So. Here's my response: Yes.", " So. ", " Yes."),
    ("seed_oss", "", "<seed:think>So.</seed:think>Yes.", "So.", "Yes."),
    (
        "openai_gptoss",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "So.",
        "Yes.",
    ),
    (
        "openai_gptoss",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>analysis<|message|>Or.<|end|><|start|>"
        "assistant<|channel|>commentary<|message|>Now.<|end|><|start|>assistant to=functions.f<|channel|>commentary "
        "<|constrain|>json<|message|>{}",
        "So.\nOr.",
        "Now.<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>",
    ),
    ("openai_gptoss", "", "no < channels", "", "no < channels"),
    ("openai_gptoss", "", "<|channel|>final<|message|>Yes.<|start|>assis", "", "Yes."),  # cut off
]


@pytest.mark.parametrize(("style", "prompt", "text", "reasoning", "content"), TRANSCRIPTS)
def test_a_transcript_is_split_at_every_cut(style: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    assert _split(style, prompt, list(text)) == (reasoning, content)
    for cut in range(len(text)):
        assert _split(style, prompt, [text[:cut], text[cut:]]) == (reasoning, content)


def test_every_form_has_a_transcript() -> None:
    assert {style for style, *_ in TRANSCRIPTS} == set(distinct(REASONING_PARSERS))


def test_text_is_held_back_only_while_it_may_be_a_tag() -> None:
    parser = TAGGED["qwen3"].parser()
    assert not parser.is_reasoning
    assert parser.push("<thi") == ("", "")
    assert parser.push("nk>\nOne < two") == ("\nOne < two", "")
    assert parser.is_reasoning
    assert parser.push(" </thin") == (" ", "")
    assert parser.push("g </think") == ("</thing ", "")
    assert parser.push(">\n\nThree <think>") == ("", "\n\nThree <think>")
    assert not parser.is_reasoning
    assert parser.finish() == ("", "")


def test_an_output_without_an_end_is_reasoning_and_one_without_a_start_is_content() -> None:
    assert _split("qwen3", "", ["<think>cut </th"]) == ("cut </th", "")
    assert _split("qwen3", "<think>\n", ["cut off"]) == ("cut off", "")
    assert _split("qwen3", "", ["no </think> here"]) == ("", "no </think> here")


def test_reasoning_is_counted_by_the_tokens_around_it() -> None:
    names = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "analysis", "final", "a"]
    ids = {name: index for index, name in enumerate(names)}
    said = "<|channel|> analysis <|message|> a analysis a <|end|> <|start|> a <|channel|> final <|message|> a analysis"
    output = [ids[word] for word in said.split()]
    for size in (1, 2, len(output)):
        counter = REASONING_PARSERS["openai_gptoss"].form.counter(ids.get)
        assert sum(counter.count(output[at : at + size], False) for at in range(0, len(output), size)) == 3


_HEADER = "<|channel|>analysis<|message|>"


@pytest.mark.parametrize(
    ("style", "prompt", "repeated"),
    [
        *itertools.product(["qwen3"], ["", "<think>"], ["<", "</think", " ", "<think>", "<think></think>", "a"]),
        *itertools.product(["openai_gptoss"], [""], ["<", " ", "<|channel|>", _HEADER, _HEADER + "a<|end|>", "to="]),
        *itertools.product(["granite"], ["Here is my thought process:"], ["H", "Here is my ", "a"]),
    ],
)
@pytest.mark.parametrize("piece", [1, 2**20])
def test_a_megabyte_of_adversarial_text_takes_linear_time(style: str, prompt: str, repeated: str, piece: int) -> None:
    assert pushes_in_linear_time(lambda: REASONING_PARSERS[style].form.parser(prompt), "", repeated, piece)
