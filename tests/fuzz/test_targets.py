"""Every target of `targets.py` with thousands of mutated inputs: accepted or refused quickly, in little memory."""

from __future__ import annotations

import random
import time
import zlib

import pytest

from tests.fuzz import FEW, MANY
from tests.fuzz.mutations import mutate
from tests.fuzz.targets import TARGETS
from tests.support.peak_memory import peak, start_peak

MOST_SECONDS = 5.0  # of the thread, for one input
NEVER_REFUSE = {"stream", "stop", "parsers"}  # model outputs are never invalid
MAY_REFUSE_SEEDS = {"verdicts", "image", "video"}  # their seeds include invalid values

pytestmark = pytest.mark.filterwarnings("ignore:temperature is less than", "ignore:Possible nested set")


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_taken(name: str) -> None:
    """Otherwise mutations would be of input that is not read."""
    target = TARGETS[name]
    assert all([target.check(seed) for seed in target.seeds()]) or name in MAY_REFUSE_SEEDS


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TARGETS)
def test_changed_inputs_are_taken_or_refused(name: str, count: int) -> None:
    target, chance = TARGETS[name], random.Random(zlib.crc32(name.encode()) + count)
    seeds = target.seeds()
    target.check(seeds[0])  # excludes one-time work
    before = start_peak()
    refused = 0
    for number in range(count):
        data = mutate(chance.choice(seeds), chance)
        started = time.thread_time()
        try:
            refused += not target.check(data)
        except BaseException as error:
            raise AssertionError(f"input {number}: {data[:2000]!r}") from error
        assert time.thread_time() - started < MOST_SECONDS, data[:2000]
    assert (refused > 0) != (name in NEVER_REFUSE)
    assert peak() - before < target.most_memory
