"""Responses that clients may ask for again, or go on from: so many bytes of them, in memory, each its client's alone.

A response is kept as the JSON that its client gets, beside that of its own input; the input of those before it is
found by their ids. Where there is no room, the client that holds the most loses what it used longest ago: to keep more
does not push out what others keep. Pure but for what it holds: no clock, no threads.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from jaxllm.errors import UserError
from jaxllm_server.responses.items import RESPONSE_PREFIX, Item

_connections = count(1)
_OVERHEAD = 1024  # bytes of an entry beside its texts; of a client with one alone it is 700 (measured)


@dataclass(frozen=True, slots=True)
class Stored:
    """One response, and what it was asked."""

    response: bytes  # JSON
    items: bytes  # a JSON list: the request's own input items, after those of earlier responses that it outlasts
    previous: str | None  # the response from which it went on

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.response) + len(self.items) + len(self.previous or "") + _OVERHEAD


class LostError(LookupError):
    """A response that is not kept: it never was, or was deleted, or had to go."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.response_id = name[name.find(RESPONSE_PREFIX) :]  # without the prefix of a connection


class ResponseStore:
    """At most `most_bytes` of responses."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self.kept: dict[str, OrderedDict[str, Stored]] = {}  # by client and id, the one used longest ago first
        self.held: dict[str, int] = {}  # bytes by client
        self.num_bytes = 0

    def put(self, client: str, response_id: str, stored: Stored) -> None:
        """Keep a response, in place of one of the same id; one that is too large alone is not kept."""
        self.delete(client, response_id)
        if stored.size > self._most:
            return
        self.kept.setdefault(client, OrderedDict())[response_id] = stored
        self._count(client, stored.size)
        while self.num_bytes > self._most:
            largest = max(self.held, key=self.held.__getitem__)
            self.delete(largest, next(iter(self.kept[largest])))

    def get(self, client: str, response_id: str) -> Stored:
        """Return a response.

        Raises:
            LostError: if it is not kept, or another client's.
        """
        stored = self.kept.get(client, {}).get(response_id)
        if stored is None:
            raise LostError(response_id)
        return stored

    def chain(self, client: str, response_id: str) -> dict[str, Stored]:
        """Return the responses that led to one, and itself, by their ids, the first one first; they count as used now.

        One that took the id of an earlier one may lead to itself: it is there once.

        Raises:
            LostError: naming the one of them that is not kept.
        """
        chain: dict[str, Stored] = {}
        following: str | None = response_id
        while following is not None and following not in chain:
            chain[following] = self.get(client, following)
            self.kept[client].move_to_end(following)
            following = chain[following].previous
        return dict(reversed(chain.items()))

    def delete(self, client: str, response_id: str) -> bool:
        """Forget a response; return whether it was kept."""
        stored = self.kept.get(client, {}).pop(response_id, None)
        if stored is None:
            return False
        self._count(client, -stored.size)
        return True

    def _count(self, client: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.held[client] = self.held.get(client, 0) + num_bytes
        if not self.held[client]:
            del self.held[client], self.kept[client]


class OfConnection:
    """Keeps the last response of a connection with `store` off, and those that led to it, until the connection ends.

    They are in the store like others, under names that no request can contain.
    """

    def __init__(self, store: ResponseStore, client: str) -> None:
        self._store = store
        self._client = client
        self._prefix = f"{next(_connections)}:"
        self._names: set[str] = set()
        self.used: str | None = None  # the name of the response that the current request continues

    def name_of(self, response_id: str) -> str:
        """Return the name of a response in the store."""
        own = self._prefix + response_id
        return own if own in self._names else response_id

    def own(self, chain: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return the responses of a conversation that are kept for the connection alone; they are its newest ones."""
        return {name: stored for name, stored in chain.items() if name in self._names}

    def put(self, response_id: str, stored: Stored) -> None:
        """Keep a response and those that led to it; forget the others."""
        name = self._prefix + response_id
        self._names.add(name)
        self._store.put(self._client, name, stored)
        try:
            chain = self._store.chain(self._client, name)
        except LostError:  # no room was left for it or an earlier one
            chain = {}
        self._forget(self._names - chain.keys())

    def forget_used(self) -> None:
        """Forget the response that a failed request was to continue."""
        if self.used is not None:
            self._forget({self.used})

    def close(self) -> None:
        """Forget all."""
        self._forget(set(self._names))

    def _forget(self, names: set[str]) -> None:
        for name in names & self._names:
            self._store.delete(self._client, name)
        self._names -= names


def history_of(chain: Iterable[Stored]) -> list[Item]:
    """Return the items of a conversation: what each response was asked, and what it answered."""
    return [item for stored in chain for item in _items_of(stored)]


def _items_of(stored: Stored) -> list[Item]:
    return [*json.loads(stored.items), *json.loads(stored.response)["output"]]


def ordered(chain: Sequence[Stored], own: Sequence[Item], is_ascending: bool) -> Iterator[Item]:
    """Give the items of a conversation and those of its next input; of those before, one response is read at a time."""
    if is_ascending:
        for stored in chain:
            yield from _items_of(stored)
        yield from own
    else:
        yield from reversed(own)
        for stored in reversed(chain):
            yield from reversed(_items_of(stored))


def find_items(stored: Iterable[Stored], ids: Collection[str]) -> dict[str, Item]:
    """Return those of some responses' items that have one of some ids, by them."""
    return {item["id"]: item for item in history_of(stored) if item["id"] in ids}


def page_of(items: Iterator[Item], limit: int, after: str | None) -> dict[str, object]:
    """Return a part of the items of a list as the API lists them: `limit` of those after the one with the id `after`.

    Raises:
        UserError: naming `after`, if no item has that id.
    """
    if after is not None and not any(each["id"] == after for each in items):
        raise UserError("after must be the id of one of the items.", "after")
    found = list(islice(items, limit + 1))
    page = found[:limit]
    ends = {"first_id": page[0]["id"] if page else "", "last_id": page[-1]["id"] if page else ""}
    return {"object": "list", "data": page, **ends, "has_more": len(found) > limit}
