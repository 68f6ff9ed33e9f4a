"""Scanners of untrusted text take linear time, for text cut anywhere.

Tool calls and reasoning have the same check in their tests, stop strings in fuzz/test_properties.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from jaxllm.bench.sse import EventReader
from jaxllm.errors import UserError
from jaxllm_server.shared import strict_json
from tests.support.linear import is_linear

MEGABYTE = 1 << 20


def read_events(text: str, piece: int) -> None:
    reader, raw = EventReader(), text.encode()
    for at in range(0, len(raw), piece):
        reader.feed(raw[at : at + piece])


def read_json(text: str, piece: int) -> None:
    with suppress(UserError):
        strict_json.read(text.encode(), 64)


CASES: dict[str, tuple[Any, str, str]] = {  # scanner, beginning of the text, repeated part
    "events in one line": (read_events, "data: ", "a"),
    "events without a text": (read_events, "", "\n"),
    "events of one letter": (read_events, "", "data: a\n\n"),
    "a JSON text of escapes": (read_json, '{"a":"', '\\\\"\\'),
    "a JSON text of quotes": (read_json, '{"a":', '"'),
    "a JSON list of texts": (read_json, '{"a":[', '"\\"",'),
    "JSON halves of pairs": (read_json, '{"a":"', "\\ud83d"),
    "JSON brackets": (read_json, '{"a":[', "[],{}, "),
}


CUTS = [(case, piece) for case in CASES for piece in (1, MEGABYTE) if not (piece == 1 and CASES[case][0] is read_json)]


@pytest.mark.ci
@pytest.mark.parametrize(("case", "piece"), CUTS)
def test_twice_the_text_takes_twice_the_time(case: str, piece: int) -> None:
    read, start, repeated = CASES[case]

    def prepare(size: int) -> Callable[[], object]:
        text = start + repeated * (size // len(repeated))
        return lambda: read(text, piece)

    assert is_linear(prepare, MEGABYTE // 2 if piece > 1 else MEGABYTE // 16)  # a call costs ten characters' time
