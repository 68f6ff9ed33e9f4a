"""In-memory store of responses, bounded in bytes, private to each client. Pure.

Without space, the client with the most bytes loses its least recently used response, so it cannot evict others'.
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
_OVERHEAD = 1024  # per entry; 700 measured


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and its input."""

    response: bytes
    items: bytes  # JSON list: the request's items, after those of connection-only responses that it outlives
    previous: str | None

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items) + len(self.previous or "") + _OVERHEAD


class LostError(LookupError):
    """A response is not stored, or no longer."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.response_id = name[name.find(RESPONSE_PREFIX) :]  # without a connection's prefix


class ResponseStore:
    """Stores at most `most_bytes` of responses."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self.kept: dict[str, OrderedDict[str, StoredResponse]] = {}  # by client and id, least recently used first
        self.held: dict[str, int] = {}
        self.num_bytes = 0

    def put(self, client: str, response_id: str, stored: StoredResponse) -> None:
        """Store a response, unless larger than the store; if full, evict the largest client's least recently used."""
        self.delete(client, response_id)
        if stored.size > self._most:
            return
        self.kept.setdefault(client, OrderedDict())[response_id] = stored
        self._count(client, stored.size)
        while self.num_bytes > self._most:
            largest = max(self.held, key=self.held.__getitem__)
            self.delete(largest, next(iter(self.kept[largest])))

    def get(self, client: str, response_id: str) -> StoredResponse:
        """Return a client's response, not marked as used; raise LostError without it."""
        stored = self.kept.get(client, {}).get(response_id)
        if stored is None:
            raise LostError(response_id)
        return stored

    def chain(self, client: str, response_id: str) -> dict[str, StoredResponse]:
        """Return a response and its predecessors by id, oldest first, marked as used; raise LostError.

        A response that replaced a predecessor of the same id may lead to itself; each occurs once.
        """
        chain: dict[str, StoredResponse] = {}
        following: str | None = response_id
        while following is not None and following not in chain:
            chain[following] = self.get(client, following)
            self.kept[client].move_to_end(following)
            following = chain[following].previous
        return dict(reversed(chain.items()))

    def delete(self, client: str, response_id: str) -> bool:
        """Delete a response; return whether it existed."""
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


class ConnectionResponses:
    """Keeps a connection's last response with `store` off, and its predecessors, until it ends.

    No request can contain their names in the store.
    """

    def __init__(self, store: ResponseStore, client: str) -> None:
        self._store = store
        self._client = client
        self._prefix = f"{next(_connections)}:"
        self._names: set[str] = set()
        self.used: str | None = None

    def name_of(self, response_id: str) -> str:
        own = self._prefix + response_id
        return own if own in self._names else response_id

    def own(self, chain: Mapping[str, StoredResponse]) -> dict[str, StoredResponse]:
        """Return the responses that only the connection keeps."""
        return {name: stored for name, stored in chain.items() if name in self._names}

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Store a response; delete the connection's others that do not lead to it."""
        name = self._prefix + response_id
        self._names.add(name)
        self._store.put(self._client, name, stored)
        try:
            chain = self._store.chain(self._client, name)
        except LostError:
            chain = {}
        self._forget(self._names - chain.keys())

    def forget_used(self) -> None:
        if self.used is not None:
            self._forget({self.used})

    def close(self) -> None:
        self._forget(set(self._names))

    def _forget(self, names: set[str]) -> None:
        for name in names & self._names:
            self._store.delete(self._client, name)
        self._names -= names


def history_of(chain: Iterable[StoredResponse]) -> list[Item]:
    return [item for stored in chain for item in _items_of(stored)]


def _items_of(stored: StoredResponse) -> list[Item]:
    return [*json.loads(stored.items), *json.loads(stored.response)["output"]]


def ordered(chain: Sequence[StoredResponse], own: Sequence[Item], is_ascending: bool) -> Iterator[Item]:
    if is_ascending:
        for stored in chain:
            yield from _items_of(stored)
        yield from own
    else:
        yield from reversed(own)
        for stored in reversed(chain):
            yield from reversed(_items_of(stored))


def find_items(stored: Iterable[StoredResponse], ids: Collection[str]) -> dict[str, Item]:
    return {item["id"]: item for item in history_of(stored) if item["id"] in ids}


def page_of(items: Iterator[Item], limit: int, after: str | None) -> dict[str, object]:
    """Return a page in the API's list form: up to `limit` after the item `after`, which must exist."""
    if after is not None and not any(each["id"] == after for each in items):
        raise UserError("after must be the id of one of the items.", "after")
    found = list(islice(items, limit + 1))
    page = found[:limit]
    ends = {"first_id": page[0]["id"] if page else "", "last_id": page[-1]["id"] if page else ""}
    return {"object": "list", "data": page, **ends, "has_more": len(found) > limit}
