"""Run only by test_optimized.py under `python -O`, where the first two must fail and the third must pass."""

from __future__ import annotations

import pytest

from tests.fuzz import texts


def test_an_assertion_of_a_test_is_kept() -> None:
    assert __debug__


def test_an_assertion_of_what_tests_share_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "finish", lambda *_: "wrong")
    texts.check_stream("embedded", [], [40], True, iter([1]))


def test_assertions_of_the_product_are_gone() -> None:
    exec("assert False", {})  # compiled here, as the product's modules are
