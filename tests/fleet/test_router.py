"""Requests of a lost replica, and late messages from it, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm import SamplingParams, UserError
from jaxllm.errors import UnavailableError
from jaxllm.fleet import wire
from jaxllm.fleet.replica import Replica, RoutedRequest
from jaxllm.fleet.replica_listener import Greeting, ReplicaAddress
from jaxllm.fleet.router import Router
from jaxllm.fleet.supervisor import Supervisor
from jaxllm.metrics import Load, Metrics
from jaxllm.version import __version__

LOST = UnavailableError("lost")


def request(name: str, sent: Any = None) -> RoutedRequest:
    return RoutedRequest(
        request_id=name,
        internal_id=name,
        name=name,
        prompt=[1, 2, 3],
        prompt_token_ids=[1, 2, 3],
        digests=(),
        params=SamplingParams(),
        sent=sent,
        priority=0,
        num_sequences=1,
    )


def routed(count: int, play: Callable[[Router, list[Replica]], None]) -> dict[str, Exception]:
    """Call `play` with a router of `count` serving replicas; return the failed requests."""
    failed: dict[str, Exception] = {}

    async def run() -> None:
        replicas = [Replica(number, is_local=True) for number in range(count)]
        for replica in replicas:
            replica.model = {}
            replica.on_beat("serving", Load(), Metrics())
        play(Router(replicas, failed.__setitem__), replicas)

    asyncio.run(run())
    return failed


def test_a_request_is_run_again_once() -> None:
    """A request that crashes its replica is rerouted only once, since it could crash all replicas in turn."""

    def play(router: Router, replicas: list[Replica]) -> None:
        router.add(request("a"))
        for number in range(2):
            assert list(replicas[number].live) == ["a"]
            router.lost(replicas[number], LOST)
        assert not replicas[2].live

    assert routed(3, play) == {"a": LOST}


def test_what_was_answered_in_part_fails() -> None:
    def play(router: Router, replicas: list[Replica]) -> None:
        for name in ("a", "b", "c"):
            router.add(request(name))
        assert [list(each.live) for each in replicas] == [["a", "c"], ["b"]]
        replicas[0].note_output("a", 1)
        router.lost(replicas[0], LOST)
        assert list(replicas[1].live) == ["b", "c"] and replicas[1].num_tokens == 6
        assert replicas[0].num_tokens == 0 and not replicas[0].takes_work

    assert routed(2, play) == {"a": LOST}


def test_what_cannot_be_sent_spoils_nothing() -> None:
    def play(router: Router, replicas: list[Replica]) -> None:
        with pytest.raises(UserError, match="cannot be sent"):
            router.add(request("a", sent=object()))
        router.add(request("b"))
        assert list(replicas[0].live) == ["b"] and replicas[0].num_tokens == 3

    assert routed(1, play) == {}


class Connection:
    """A connection that keeps the last written bytes."""

    is_closed = False

    def write(self, packed: bytes) -> None:
        self.written = packed

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


class Noting:
    """A listener that records messages."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def heard(self, replica: Replica, said: list[Any]) -> None:
        self.said += said

    def lost(self, replica: Replica, error: Exception) -> None:
        replica.end(error)

    def hopeless(self, error: Exception) -> None:
        raise error


def supervising(replica: Replica, listener: Noting) -> Supervisor:
    address, none = ReplicaAddress("localhost:1", "key"), Any
    return Supervisor([replica], listener, lambda *_: none, hang_timeout=1.0, module="", address=address)


async def test_a_replica_that_is_lost_is_not_heard_any_more() -> None:
    """Unread messages of a lost replica are dropped: they may be outputs of a request that now runs elsewhere."""

    replica, listener = Replica(0, is_local=False), Noting()
    supervisor = supervising(replica, listener)
    old, reader = Connection(), asyncio.StreamReader()

    def say(*said: Any) -> None:
        reader.feed_data(wire.frame([wire.pack(each) for each in said]))

    reader.feed_data(Greeting(__version__, "", b"key").pack())
    hearing = asyncio.ensure_future(supervisor.connected_from_afar(reader, old))
    say(("one",))
    while listener.said != [("one",)]:
        await asyncio.sleep(0)
    replica.end(LOST)
    replica.connect(Connection())  # the restarted process
    say(("two",))
    reader.feed_eof()
    await hearing
    assert listener.said == [("one",)] and old.is_closed
    assert not replica.lost.is_set(), "the end of an old connection is not the end of the new one"


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (Greeting(__version__, "", b"another"), "its key is not the server's first --admin-api-key"),
        (Greeting("0.0", "", b"key"), "it runs version '0.0'"),
        (Greeting(__version__, "", b"key"), "data_parallel_size allows no more replicas"),
    ],
)
async def test_who_is_refused_hears_why(greeting: Greeting, why: str) -> None:
    replica = Replica(0, is_local=False)
    replica.connected.set()
    supervisor = supervising(replica, Noting())
    connection, reader = Connection(), asyncio.StreamReader()
    reader.feed_data(greeting.pack())
    await supervisor.connected_from_afar(reader, connection)
    assert connection.is_closed and why.encode() in connection.written


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(("add", "output", "drop")), st.sampled_from("abc"), st.integers(0, 9))))
def test_the_tokens_of_a_replica_are_those_of_its_requests(events: list[tuple[str, str, int]]) -> None:
    def play(router: Router, replicas: list[Replica]) -> None:
        (replica,) = replicas
        for event, name, count in events:
            if event == "add" and name not in replica.live:
                replica.add(request(name))
            elif event == "output":
                replica.note_output(name, count)
            elif event == "drop":
                replica.drop(name)
            assert replica.num_tokens == sum(live.num_tokens for live in replica.live.values())

    routed(1, play)
