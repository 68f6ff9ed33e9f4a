"""Compare the routing rule and the index with naive ones, and find mutants of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxllm import fleet
from jaxllm.fleet import PrefixIndex
from jaxllm.fleet.choose import OVERLOAD, WORTH
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.occupancy import digests_of
from jaxllm.scheduler.state import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from tests.fuzz.doors import Doors
from tests.simulation.mutants import Mutant, planted

BLOCK = 4
DIGESTS = [bytes([number]) * 32 for number in range(4)]
REPLICAS = [0, 3, 10**6]

digests = st.sampled_from(DIGESTS)
prompts = st.lists(digests, max_size=4, unique=True)
events = st.one_of(
    st.builds(lambda digest: BlockStored(digest, None, (0,) * BLOCK), digests),
    st.builds(BlockRemoved, digests),
    st.just(AllBlocksCleared()),
)
# Changes of an index: events of a replica, or None when the replica is removed.
histories = st.lists(
    st.tuples(st.sampled_from(REPLICAS), st.one_of(st.none(), st.lists(events, max_size=5))), max_size=8
)


History = Sequence[tuple[int, list[BlockEvent] | None]]
Check = Callable[[History, Sequence[bytes], Mapping[int, int]], None]


def play(history: History) -> tuple[PrefixIndex, dict[int, set[bytes]]]:
    """Apply a history to an index, and to a dict of sets."""
    index, held = PrefixIndex(), dict[int, set[bytes]]()
    for replica, step in history:
        if step is None:
            index.forget(replica)
            held.pop(replica, None)
            continue
        index.apply(replica, step)
        blocks = held.setdefault(replica, set())
        for event in step:
            match event:
                case BlockStored():
                    blocks.add(event.digest)
                case BlockRemoved():
                    blocks.discard(event.digest)
                case AllBlocksCleared():
                    blocks.clear()
    return index, held


def leading(prompt: Sequence[bytes], blocks: set[bytes]) -> int:
    return next((count for count, digest in enumerate(prompt) if digest not in blocks), len(prompt))


def check_index(history: History, prompt: Sequence[bytes], loads: Mapping[int, int]) -> None:
    index, held = play(history)
    counts = {replica: leading(prompt, blocks) for replica, blocks in held.items()}
    assert index.matches(prompt) == {replica: count for replica, count in counts.items() if count}
    # The index keeps no block that no replica has.
    assert set(index.holders) == set().union(*held.values())
    assert {replica: blocks for replica, (_, blocks) in index.replicas.items()} == held


def check_choice(history: History, prompt: Sequence[bytes], loads: Mapping[int, int]) -> None:
    index, held = play(history)
    chosen = fleet.choose(prompt, loads, index)
    assert chosen == fleet.choose(prompt, dict(reversed([*loads.items()])), index)
    assert chosen in loads
    counts = {replica: leading(prompt, held.get(replica, set())) for replica in loads}
    mean = sum(loads.values()) / len(loads)
    able = [
        replica
        for replica, load in loads.items()
        if load <= OVERLOAD * mean or load <= mean + WORTH * BLOCK * counts[replica]
    ]
    assert counts[chosen] == max(counts[replica] for replica in able)
    equals = [replica for replica in able if counts[replica] == counts[chosen]]
    lightest = min(loads[replica] for replica in equals)
    assert chosen == min(replica for replica in equals if loads[replica] == lightest)


some_loads = st.dictionaries(
    st.sampled_from(REPLICAS), st.one_of(st.integers(0, 100), st.sampled_from([0, 1000])), min_size=1
)
CHECKS: list[Check] = [check_index, check_choice]


def run(check: Check, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(histories, prompts, some_loads)
    def generated(history: History, prompt: list[bytes], loads: dict[int, int]) -> None:
        check(history, prompt, loads)

    generated()


@pytest.mark.parametrize("check", CHECKS)
def test_equals_a_naive_one(check: Check) -> None:
    run(check, 200)


MISTAKES = [
    (check_index, Mutant("a replica that goes leaves its blocks", "fleet.prefix_index.PrefixIndex.forget",
                         "self._release(held, bit)", "pass")),
    (check_index, Mutant("a replica that goes stays", "fleet.prefix_index.PrefixIndex.forget",
                         "if replica in self.replicas:", "if False:")),
    (check_index, Mutant("Cleared is ignored", "fleet.prefix_index.PrefixIndex.apply",
                         "self._release(held, bit)\n            held.clear()", "pass")),
    (check_index, Mutant("Removed is ignored", "fleet.prefix_index.PrefixIndex.apply",
                         "if event.digest in held:", "if False:")),
    (check_index, Mutant("two replicas share a bit", "fleet.prefix_index.PrefixIndex.apply",
                         "~used & (used + 1)", "1 << len(self.replicas)")),
    (check_index, Mutant("holes are skipped", "fleet.prefix_index.PrefixIndex.matches",
                         "all_have & self.holders.get(digest, 0)", "all_have & self.holders.get(digest, all_have)")),
    (check_choice, Mutant("ties go by the dict's order", "fleet.choose.choose",
                          "loads[replica], replica)", "loads[replica])")),
    (check_choice, Mutant("who is not there is chosen", "fleet.choose.choose",
                          "filter(is_able, loads)", "matches or filter(is_able, loads)")),
    (check_choice, Mutant("over-loaded ones are chosen", "fleet.choose.choose", "filter(is_able, loads)", "loads")),
    (check_choice, Mutant("prefixes are ignored", "fleet.choose.choose", "-matches.get(replica, 0),", "0,")),
    (check_choice, Mutant("loads are ignored", "fleet.choose.choose", "loads[replica], replica)", "0, replica)")),
]  # fmt: skip


@pytest.mark.parametrize(("check", "mutant"), MISTAKES, ids=[mutant.name for _, mutant in MISTAKES])
def test_a_planted_mistake_is_found(check: Check, mutant: Mutant) -> None:
    with planted(mutant), pytest.raises((AssertionError, KeyError)):
        run(check, 1000)


def test_no_replica_takes_work() -> None:
    with pytest.raises(ValueError, match="no replica is available"):
        fleet.choose([], {}, PrefixIndex())


def test_the_digests_of_a_prompt_are_those_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Doors().llm.engine
    limits, seen = engine.runner.limits, {}
    adapters: Any = engine.features.by_name["adapters"]
    ids = [*range(5, 5 + 3 * limits.block_size + 1)]
    for salt in ("", "a", "ab", "é"):
        for adapter in (b"", b"b", b"\0" * 32):
            own = SimpleNamespace(digest=adapter, language=adapters.core.language)
            monkeypatch.setattr(adapters.store, "get", lambda request, own=own: own)
            prompt = {"prompt_token_ids": ids, **({"cache_salt": salt} if salt else {})}
            options = {"lora_request": "it"} if adapter else {}
            accepted = engine.inputs.accept("r", prompt, SamplingParams(), 0, options)
            _, (request,) = engine.inputs.make_group(accepted, 0.0)
            expected = digests_of(request, limits, (), len(ids))
            assert tuple(fleet.digests_of(ids, salt.encode(), limits.block_size, adapter=adapter)) == expected
            seen[salt, adapter] = expected
    assert all(len(each) == 3 for each in seen.values()) and len(set(seen.values())) == len(seen)
