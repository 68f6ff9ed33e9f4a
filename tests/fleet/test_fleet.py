"""Fleets of 1, 4 and 64 replicas that start, drain and are killed: no request is lost, and routing balances load."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from jaxllm import fleet
from jaxllm.fleet import PrefixIndex
from jaxllm.scheduler.state import Limits
from tests.fleet import mixes
from tests.fleet.fleet import Fleet, Outcome, least_loaded, make_changes
from tests.fleet.replica import LIMITS, Asked, Replica, Yield
from tests.simulation.mutants import Mutant, planted

# A pool short of blocks: cached blocks are evicted, and running requests preempted.
SHORT = Limits(
    num_slots=16, num_blocks=512, block_size=16, max_step_tokens=1024, max_step_chunks=8, records_blocks=True
)


def production(digests: Sequence[bytes], loads: Mapping[int, int], index: PrefixIndex) -> int:
    """Route with the package's function, or the mutant that replaces it."""
    return fleet.choose(digests, loads, index)


class Checked(Fleet):
    """Periodically compare the index and the loads with the replicas' state."""

    num_steps = 0

    def _take(self, replica: Replica, step: Yield, asked_of: Mapping[int, Asked]) -> None:
        super()._take(replica, step, asked_of)
        self.num_steps += 1
        if self.num_steps % (10 * len(self.replicas)) == 0:
            self.check(replica)

    def check(self, replica: Replica) -> None:
        """Compare with a replica between steps; during a step its pool contains events that it has not yet sent."""
        assert self.loads[replica.number] == sum(len(tokens) for _, tokens in replica.live.values())
        pool = set(replica.state.pool.index)
        for digest in pool.union(self.index.holders):
            holders = self.index.matches([digest])
            assert (digest in pool) == (replica.number in holders)
            assert holders.keys() <= self.replicas.keys()


def play(asked: Sequence[Asked], num_replicas: int, limits: Limits = LIMITS, kind: type[Checked] = Checked) -> Outcome:
    """Play; check that each request got its answer exactly once, and that no load or block is left."""
    changes = make_changes(num_replicas, 4 + num_replicas // 4, max(each.arrival for each in asked), seed=1)
    played = kind(production, asked, num_replicas, changes, limits)
    outcome = played.play()
    for replica in played.replicas.values():
        played.check(replica)
        assert not replica.state.pool.references.any()
    assert not any(played.loads.values())
    wanted: dict[int, list[array[int]]] = {}
    for turn in asked:
        while turn is not None:
            wanted[turn.number] = [turn.prompt + turn.answer]
            turn = turn.follow_up
    assert outcome.answers == wanted
    return outcome


@pytest.mark.parametrize(
    ("mix", "num_replicas"),
    [
        *((mix, count) for count in (1, 4) for mix in ("skewed", "conversations", "trace")),
        pytest.param("skewed", 64, marks=pytest.mark.ci),
        *(pytest.param(mix, 64, marks=pytest.mark.slow) for mix in ("conversations", "trace")),
    ],
)
def test_no_request_is_lost(mix: str, num_replicas: int, tmp_path: Path) -> None:
    count = max(40, 10 * num_replicas)
    asked = mixes.make(mix, num_replicas, count, 1, tmp_path)
    outcome = play(asked, num_replicas)
    assert len(outcome.answers) == count and outcome.num_again > 0


def test_no_request_is_lost_where_blocks_are_short() -> None:
    outcome = play(mixes.conversations(2, 60, 0), 2, SHORT)
    assert outcome.num_again > 0


def test_routing_keeps_what_it_promises() -> None:
    """Repeated prefixes are routed to their replica, and no replica has much more load than the others."""
    asked = mixes.skewed(4, 320, 0)
    ours = Fleet(fleet.choose, asked, 4).play()
    theirs = Fleet(least_loaded, asked, 4).play()
    assert ours.reached >= 0.9 and ours.balance <= 1.2
    assert ours.hit_rate > theirs.hit_rate + 0.05


class HearsTheDead(Checked):
    """A bug: events that a replica sent before it was killed are still applied."""

    def _end(self, replica: Replica) -> None:
        if self.replicas.get(replica.number) is not replica:
            self.index.apply(replica.number, replica.end().events)
        else:
            super()._end(replica)


class ForgetsTheLost(Checked):
    """A bug: the requests of a killed replica are not rerouted."""

    def _kill(self, number: int) -> None:
        if number in self.replicas:
            self._leave(number)


@pytest.mark.parametrize("kind", [HearsTheDead, ForgetsTheLost])
def test_a_front_end_with_a_mistake_is_found(kind: type[Checked]) -> None:
    with pytest.raises(AssertionError):
        play(mixes.skewed(2, 60, 0), 2, kind=kind)


@pytest.mark.parametrize(
    "mutant",
    [
        Mutant("gone", "fleet.prefix_index.PrefixIndex.forget", "self._release(held, bit)", "pass"),
        Mutant("evicted", "fleet.prefix_index.PrefixIndex.apply", "if event.digest in held:", "if False:"),
    ],
    ids=lambda mutant: mutant.name,
)
def test_a_planted_mistake_is_found_in_a_fleet(mutant: Mutant) -> None:
    with planted(mutant), pytest.raises(AssertionError):
        play(mixes.conversations(2, 100, 0), 2, SHORT)
