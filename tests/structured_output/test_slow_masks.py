"""Slow masks in worker threads: requests share the time, a thread that fails to start is retried, all can end."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from jaxllm.structured_output import slow_masks
from jaxllm.structured_output.slow_masks import Job, Pace, SlowMasks
from tests.support.inspection import unfinished

WORDS = np.zeros(1, np.int32)


def held_by(masks: SlowMasks, request: Pace) -> tuple[Job, threading.Event]:
    """Begin a piece of work that ends when an event is set; return both once it has begun."""
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        end.wait()

    job = masks.begin(request, work, WORDS)
    begun.wait()
    return job, end


def test_a_request_that_has_used_less_time_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_masks, "NUM_THREADS", 1)
    masks, done, many = SlowMasks(), [], Pace()
    _, held = held_by(masks, many)
    for number in range(2):
        masks.begin(many, lambda number=number: done.append(f"many {number}"), WORDS)
    masks.begin(Pace(), lambda: done.append("one"), WORDS)
    held.set()
    masks.wait(10)
    assert done == ["one", "many 0", "many 1"]


def test_one_thread_at_a_time_makes_masks_of_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_masks, "NUM_THREADS", 2)
    masks, one = SlowMasks(), Pace()
    _, held = held_by(masks, one)
    second = masks.begin(one, lambda: None, WORDS)
    _, other_held = held_by(masks, Pace())  # another grammar's is made meanwhile
    masks.wait(0.05)
    assert not second.is_done
    other_held.set()
    held.set()
    masks.wait(10)
    assert second.is_done and unfinished(masks)[:2] == (0, 0)


def test_a_thread_that_cannot_be_had_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = SlowMasks()
    with monkeypatch.context() as without:

        def start(*_: object) -> None:
            raise RuntimeError("can't start new thread")

        without.setattr(slow_masks, "start_thread", start)
        job = masks.begin(Pace(), lambda: None, WORDS)
        masks.start()
        assert not job.is_done
    masks.start()
    masks.wait(10)
    assert job.is_done


def test_closing_ends_what_is_begun_and_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_masks, "NUM_THREADS", 1)
    masks = SlowMasks()
    first, held = held_by(masks, Pace())
    second = masks.begin(Pace(), lambda: None, WORDS)
    closing = threading.Thread(target=masks.close)
    closing.start()
    while unfinished(masks)[0]:
        pass
    held.set()
    closing.join(10)
    masks.wait(0)
    assert first.is_done and not second.is_done and unfinished(masks) == (0, 0, 0)


def test_a_request_is_slow_until_its_masks_have_been_quick_for_long() -> None:
    pace = Pace()
    pace.note(slow_masks.SLOW_SECONDS / 2)
    assert not pace.is_slow
    pace.note(slow_masks.SLOW_SECONDS * 2)
    for _ in range(slow_masks.PATIENCE):
        assert pace.is_slow
        pace.note(0.0)
    assert not pace.is_slow


def test_earlier_use_of_a_grammar_delays_it_for_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_masks, "NUM_THREADS", 1)
    masks, popular, new = SlowMasks(), Pace(), Pace()
    popular.used = 1000.0
    _, held = held_by(masks, Pace())
    for pace in (popular, new):
        masks.begin(pace, lambda: None, WORDS)
    assert new.used == popular.used
    late = Pace()
    late.used = 5000.0
    masks.begin(late, lambda: None, WORDS)
    assert late.used == popular.used + slow_masks.MOST_LEAD
    held.set()
    masks.wait(10)
    masks.close()
