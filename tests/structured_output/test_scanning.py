"""A grammar is scanned in linear time: 16 KB that are rescanned at each quote take 3 s."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from jaxllm.errors import UserError
from jaxllm.structured_output import ebnf

BEGINNINGS = ["start: ", 'start: "', "root ::= ", 'root ::= "', "root ::= ["]
PARTS = [
    *('"', '\\"', "/", "\\/", "\\", "[", "]", "\\]", "(", ")", "{", "}", "<", ">", "#", "//", "a", " ", "\n", "=", ":"),
    *(
        "::=",
        "|",
        "*",
        "a: ",
        "a ::= ",
        "%json ",
        "%json {} ",
        "%",
        "0",
        "{1,2}",
        '"a" ',
        "[a] ",
        "/a/ ",
        "..",
        "\\x00",
    ),
]
SIZE, SECONDS = 1 << 13, 0.12


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Disable garbage collection: over the objects of earlier tests a collection takes a second."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_no_grammar_is_scanned_twice() -> None:
    draws = random.Random(5)
    repeated = [*PARTS, *("".join(draws.choices(PARTS, k=3)) for _ in range(60))]
    for beginning in BEGINNINGS:
        for each in repeated:
            began = time.thread_time()
            with suppress(UserError):
                ebnf.to_lark(beginning + each * (SIZE // len(each)), lambda schema: schema)
            assert time.thread_time() - began < SECONDS, (beginning, each)


@pytest.mark.parametrize("grammar", ['start: "a', "start: /a", 'root ::= "a', "root ::= [a", 'start: "a\n b: "c"'])
def test_what_is_not_closed_is_refused(grammar: str) -> None:
    with pytest.raises(UserError, match="not closed"):
        ebnf.to_lark(grammar, lambda schema: schema)
