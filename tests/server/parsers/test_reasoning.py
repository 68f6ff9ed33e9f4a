"""The split of reasoning and content against `str.partition` of the whole text, at every cut and at great length."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm_server.parsers.reasoning import REASONING_PARSERS
from tests.support.linear import is_linear
from tests.support.naive import split_reasoning


def _split(style: str, starts_inside: bool, pieces: Sequence[str]) -> tuple[str, str]:
    parser = REASONING_PARSERS[style](starts_inside)
    parts = [*(parser.push(piece) for piece in pieces), parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@settings(max_examples=400, deadline=None)
@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", *"<>/think a\n"]), max_size=14).map("".join),
    style=st.sampled_from(sorted(REASONING_PARSERS)),
    starts_inside=st.booleans(),
    cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_any_cut_gives_what_the_whole_text_gives(text: str, style: str, starts_inside: bool, cuts: list[int]) -> None:
    expected = split_reasoning(text, starts_inside or style == "deepseek_r1")
    ends = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *ends, len(text)])]
    assert _split(style, starts_inside, pieces) == expected
    assert _split(style, starts_inside, list(text)) == expected


def test_every_pair_of_cuts() -> None:
    for text in (
        "\n<think>\nso </thin\n</think>\n\nyes <think></think>",
        "so</think>yes",
        " <thi</think>",
        "</think>x",
    ):
        for starts_inside in (True, False):
            expected = split_reasoning(text, starts_inside)
            for first, second in itertools.combinations(range(len(text) + 1), 2):
                pieces = [text[:first], text[first:second], text[second:]]
                assert _split("qwen3", starts_inside, pieces) == expected


def test_text_is_held_back_only_while_it_may_be_a_tag() -> None:
    parser = REASONING_PARSERS["qwen3"](False)
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
    assert _split("qwen3", False, ["<think>cut </th"]) == ("cut </th", "")
    assert _split("qwen3", True, ["cut off"]) == ("cut off", "")
    assert _split("qwen3", False, ["no </think> here"]) == ("", "no </think> here")
    assert _split("deepseek_r1", False, ["so</think>yes"]) == ("so", "yes")


@pytest.mark.parametrize("starts_inside", [True, False])
@pytest.mark.parametrize("repeated", ["<", "</think", " ", "<think>", "<think></think>", "a"])
@pytest.mark.parametrize("piece", [1, 2**20])
def test_a_megabyte_of_adversarial_text_takes_linear_time(starts_inside: bool, repeated: str, piece: int) -> None:
    def prepare(size: int) -> Callable[[], object]:
        text = repeated * (size // len(repeated))
        pieces = [text[at : at + piece] for at in range(0, len(text), piece)]
        parser = REASONING_PARSERS["qwen3"](starts_inside)

        def work() -> None:
            for one in pieces:
                parser.push(one)
            parser.finish()

        return work

    assert is_linear(prepare, 2**19 if piece > 1 else 2**16)
