"""The table of verdicts (test_verdicts.py) through the three interfaces, without server or device, in one second."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fuzz.doors import doors
from tests.server.test_verdicts import ACCEPTED, BAD, BASE, GOOD, TOGETHER, is_json

pytestmark = pytest.mark.filterwarnings("ignore:temperature .* was raised")


def verdicts(fields: dict[str, Any]) -> list[str | None]:
    return [doors().python_verdict(fields), doors().grpc_verdict(fields), doors().http_verdict(fields)]


def test_good_values_are_accepted() -> None:
    for name, value in GOOD:
        assert verdicts({**BASE, name: value}) == [ACCEPTED] * 3, (name, value)


def test_bad_values_are_refused_by_their_names() -> None:
    for name, value in BAD:
        assert verdicts({**BASE, name: value}) == [name, name, name if is_json(value) else None], (name, value)


def test_values_that_are_wrong_together_are_refused() -> None:
    for fields, name in TOGETHER:
        assert verdicts({**BASE, **fields}) == [name] * 3, fields
