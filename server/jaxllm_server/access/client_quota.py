"""Limits of the calls and sequences that clients and connections have under way.

A client is distinguished by its API key or, without keys, by its address. Deals with names and numbers, not with
protocols.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from urllib.parse import unquote

from jaxllm.errors import OverloadedError


def client_of(key: str | None, host: str | None) -> str:
    """Name a client: by the name of its key, else by its address; "" for clients without either, as on a Unix socket.

    This machine is one client, and so is each IPv6 network of /64, which is what a host is given to choose from.
    """
    if key is not None or not host:
        return key or ""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return "loopback"
    return str(address if address.version == 4 else ipaddress.ip_network((address, 64), strict=False))


def peer_of(context_peer: str) -> str:
    """Return the client's address from gRPC's name of the peer, in which the filter puts it at the end of a path."""
    return unquote(context_peer).rpartition("/")[2]


def host_of_peer(peer: str) -> str | None:
    """Return the host of a peer's address: "ipv4:127.0.0.1:1234", "ipv6:[::1]:1234", "unix:"."""
    family, _, rest = peer.partition(":")
    return rest.rpartition(":")[0] if family in ("ipv4", "ipv6") else None


class Bound:
    """Counts calls or sequences under way, in total and for each holder (client or connection), with both limits."""

    def __init__(self, most: float = math.inf, share: float = math.inf) -> None:
        self.most = most  # in total
        self.share = share  # of one holder
        self.total = 0
        self.held: Counter[str] = Counter()

    def has_room(self, holder: str, count: int) -> bool:
        """Whether `count` more would be within both limits."""
        return self.total + count <= self.most and self.held[holder] + count <= self.share

    def add(self, holder: str, count: int) -> None:
        """Add `count`, which may be negative, to both numbers."""
        self.total += count
        self.held[holder] += count
        if not self.held[holder]:
            del self.held[holder]  # or every address that ever called would be remembered

    @contextmanager
    def counted(self, holder: str, count: int) -> Iterator[None]:
        """Count while the body runs."""
        self.add(holder, count)
        try:
            yield
        finally:
            self.add(holder, -count)


class Shares:
    """Bounds the sequences that each client has under way, on both front ends together."""

    def __init__(self, most: int | None) -> None:
        self.bound = Bound(share=math.inf if most is None else most)

    def check(self, client: str, num_sequences: int = 1) -> None:
        """Raise an OverloadedError if more sequences would exceed the client's share."""
        bound = self.bound
        if not bound.has_room(client, num_sequences):
            message = f"This client has {bound.held[client]} of {bound.share} sequences under way."
            raise OverloadedError(message, retry_after=1.0)

    def room(self, client: str) -> float:
        """Return how many more sequences a client may have under way."""
        return self.bound.share - self.bound.held[client]

    def place(self, client: str, num_sequences: int) -> AbstractContextManager[None]:
        """Count a call's sequences as its client's while the body runs."""
        self.check(client, num_sequences)
        return self.bound.counted(client, num_sequences)


class UrgentShares:
    """Bounds the sequences of each client with a priority below 0."""

    def __init__(self) -> None:
        self.bound = Bound()

    @contextmanager
    def place(self, client: str, priority: int, num_sequences: int, num_slots: int) -> Iterator[int]:
        """Yield the priority of a call, and count its sequences while the body runs.

        A client's sequences of a priority below 0 take at most half of the engine's slots; calls beyond that get 0.
        """
        self.bound.share = max(1, num_slots // 2)
        if priority >= 0:
            yield priority
        elif not self.bound.has_room(client, num_sequences):
            yield 0
        else:
            with self.bound.counted(client, num_sequences):
                yield priority


class Places:
    """Bounds the calls that are under way, on all connections together and on each."""

    def __init__(self, name: str, most: int, share: float = math.inf) -> None:
        self._name = name  # of such calls, for the error
        self.bound = Bound(most, share)

    def place(self, peer: str = "") -> AbstractContextManager[None]:
        """Count a connection's call while the body runs; OverloadedError if there is no room."""
        bound = self.bound
        if bound.total >= bound.most:
            raise OverloadedError(f"The server is answering {bound.most} {self._name} already.", retry_after=1.0)
        is_shared = peer == "unix:"  # without the filter all clients of a Unix socket have one name
        if bound.held[peer] >= bound.share and not is_shared:
            raise OverloadedError(f"This connection has {bound.share} {self._name} already.", retry_after=1.0)
        return bound.counted(peer, 1)


_TURNS_AT_ONCE = 4  # in a round of the event loop: a prompt takes 0.3 ms of it, and other requests run between rounds


class FairPlaces:
    """Places for prompts, which clients take in turns, one prompt a turn. Belongs to one event loop."""

    def __init__(self) -> None:
        self.waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}  # by client, the next one first
        self.num_taken = self.tokens_taken = 0
        self._most, self._most_tokens = 1, 1
        self._goes_on: asyncio.Handle | None = None  # hands out further places in the loop's next round

    @asynccontextmanager
    async def place(self, client: str, num_tokens: int, most: int, most_tokens: int) -> AsyncIterator[None]:
        """Wait for a place and hold it: of `most` places, in which all prompts have `most_tokens`, or one has more."""
        self._most, self._most_tokens = most, most_tokens
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(client, deque()).append((turn, num_tokens))
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._withdraw(client, turn)
            else:  # the turn was given at the same time
                self._give_back(num_tokens)
            raise
        try:
            yield
        finally:
            self._give_back(num_tokens)

    def _hand_out(self) -> None:
        if self._goes_on:
            return
        for _ in range(_TURNS_AT_ONCE):
            if not self._hand_out_one():
                return
        self._goes_on = asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = None
        self._hand_out()

    def _hand_out_one(self) -> bool:
        """Give the next client a place for its next prompt; return False if it does not fit."""
        if not self.waiting:
            return False
        client, turns = next(iter(self.waiting.items()))
        turn, num_tokens = turns[0]
        if turn.done():  # it was cancelled, and `_withdraw` has not run yet
            turns.popleft()
            if not turns:
                del self.waiting[client]
            return True
        is_full = self.num_taken >= self._most or self.tokens_taken + num_tokens > self._most_tokens
        if self.num_taken and is_full:
            return False
        turns.popleft()
        del self.waiting[client]
        if turns:
            self.waiting[client] = turns  # after the others
        turn.set_result(None)
        self.num_taken, self.tokens_taken = self.num_taken + 1, self.tokens_taken + num_tokens
        return True

    def _withdraw(self, client: str, turn: asyncio.Future[None]) -> None:
        """Take a prompt out; its client keeps its place among the others."""
        turns = deque(each for each in self.waiting.get(client, ()) if each[0] is not turn)
        if turns:
            self.waiting[client] = turns
        else:
            self.waiting.pop(client, None)
        self._hand_out()

    def _give_back(self, num_tokens: int) -> None:
        self.num_taken, self.tokens_taken = self.num_taken - 1, self.tokens_taken - num_tokens
        self._hand_out()
