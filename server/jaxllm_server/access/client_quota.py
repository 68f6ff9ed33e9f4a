"""Limits on concurrent calls and sequences, per client and connection."""

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
    """Return the key's name, else the address, else "", as on a Unix socket.

    This machine is one client, and so is each IPv6 /64 network, whose addresses a host may choose.
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
    """Return the client's address: gRPC's peer name, with the filter its last path component."""
    return unquote(context_peer).rpartition("/")[2]


def host_of_peer(peer: str) -> str | None:
    """Return the host in gRPC's peer name: "ipv4:127.0.0.1:1234" or "ipv6:[::1]:1234"; None for "unix:"."""
    family, _, rest = peer.partition(":")
    return rest.rpartition(":")[0] if family in ("ipv4", "ipv6") else None


class Bound:
    """Counts calls or sequences against limits in total and per holder."""

    def __init__(self, most: float = math.inf, share: float = math.inf) -> None:
        self.most = most
        self.share = share
        self.total = 0
        self.held: Counter[str] = Counter()

    def has_room(self, holder: str, count: int) -> bool:
        return self.total + count <= self.most and self.held[holder] + count <= self.share

    def add(self, holder: str, count: int) -> None:
        self.total += count
        self.held[holder] += count
        if not self.held[holder]:
            del self.held[holder]  # frees a past client's memory

    @contextmanager
    def counted(self, holder: str, count: int) -> Iterator[None]:
        self.add(holder, count)
        try:
            yield
        finally:
            self.add(holder, -count)


class Shares:
    """Limits each client's concurrent sequences."""

    def __init__(self, most: int | None) -> None:
        self.bound = Bound(share=math.inf if most is None else most)

    def check(self, client: str, num_sequences: int = 1) -> None:
        bound = self.bound
        if not bound.has_room(client, num_sequences):
            message = f"This client has {bound.held[client]} of {bound.share} concurrent sequences; retry later."
            raise OverloadedError(message, retry_after=1.0)

    def room(self, client: str) -> float:
        return self.bound.share - self.bound.held[client]

    def place(self, client: str, num_sequences: int) -> AbstractContextManager[None]:
        self.check(client, num_sequences)
        return self.bound.counted(client, num_sequences)


class UrgentShares:
    """Limits each client's sequences of priority below 0."""

    def __init__(self) -> None:
        self.bound = Bound()

    @contextmanager
    def place(self, client: str, priority: int, num_sequences: int, num_slots: int) -> Iterator[int]:
        """Count sequences within the context; yield their effective priority.

        A client may hold half of the slots with priorities below 0; further calls get 0.
        """
        self.bound.share = max(1, num_slots // 2)
        if priority >= 0:
            yield priority
        elif not self.bound.has_room(client, num_sequences):
            yield 0
        else:
            with self.bound.counted(client, num_sequences):
                yield priority


class CallLimit:
    """Limits concurrent calls, in total and per connection."""

    def __init__(self, name: str, most: int, share: float = math.inf) -> None:
        self._name = name
        self.bound = Bound(most, share)

    def place(self, peer: str = "") -> AbstractContextManager[None]:
        """Count a call within the context; raise OverloadedError at a limit."""
        bound = self.bound
        if bound.total >= bound.most:
            raise OverloadedError(
                f"The server is already handling {bound.most} {self._name}; retry later.", retry_after=1.0
            )
        is_shared = peer == "unix:"  # all Unix socket clients, without the filter
        if bound.held[peer] >= bound.share and not is_shared:
            raise OverloadedError(
                f"This connection already has {bound.share} {self._name}; retry later.", retry_after=1.0
            )
        return bound.counted(peer, 1)


_TURNS_AT_ONCE = 4  # per iteration: a prompt takes 0.3 ms


class FairAdmission:
    """Admits prompts round-robin over clients. Used on one event loop."""

    def __init__(self) -> None:
        self.waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}  # by client, in the order of turns
        self.num_taken = self.tokens_taken = 0
        self._most, self._most_tokens = 1, 1
        self._goes_on: asyncio.Handle | None = None

    @asynccontextmanager
    async def place(self, client: str, num_tokens: int, most: int, most_tokens: int) -> AsyncIterator[None]:
        """Hold a place within the context.

        At most `most` prompts with together `most_tokens` are admitted; a larger one is admitted alone.
        """
        self._most, self._most_tokens = most, most_tokens
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(client, deque()).append((turn, num_tokens))
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._withdraw(client, turn)
            else:
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
        if not self.waiting:
            return False
        client, turns = next(iter(self.waiting.items()))
        turn, num_tokens = turns[0]
        if turn.done():  # cancelled, before `_withdraw`
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
            self.waiting[client] = turns
        turn.set_result(None)
        self.num_taken, self.tokens_taken = self.num_taken + 1, self.tokens_taken + num_tokens
        return True

    def _withdraw(self, client: str, turn: asyncio.Future[None]) -> None:
        turns = deque(each for each in self.waiting.get(client, ()) if each[0] is not turn)
        if turns:
            self.waiting[client] = turns
        else:
            self.waiting.pop(client, None)
        self._hand_out()

    def _give_back(self, num_tokens: int) -> None:
        self.num_taken, self.tokens_taken = self.num_taken - 1, self.tokens_taken - num_tokens
        self._hand_out()
