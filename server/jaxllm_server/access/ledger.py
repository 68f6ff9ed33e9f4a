"""Accounts for requests' memory, from the first byte to the answer's end. Used on one event loop."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from jaxllm.errors import OverloadedError
from jaxllm.value_types import types_of
from jaxllm_server.access.client_quota import Bound
from jaxllm_server.shared.options import ServerOptions

BODIES = "bodies"  # being received or parsed
REQUESTS = "requests"
PROMPTS = "prompts"
OUTPUTS = "outputs"  # log-probabilities of whole answers
ANSWERS = "answers"  # serialized whole answers
RESPONSES = "responses"
_FREE_BYTES = 64 << 10  # per request and account, exempt: small requests are never refused
_REFUSALS = {
    BODIES: "The server is receiving too many large bodies.",
    REQUESTS: "The server is answering too many large requests.",
}
_LEAST_BYTES = 24 << 10  # per request (measured)
_NUMBER_BYTES = 32  # an integer above 256, or a float
_MANY_NUMBERS = 1024  # from this list length on, sizes are sampled
_LOOKED_AT = 256


class Ledger:
    """A server's accounts."""

    def __init__(self, options: ServerOptions) -> None:
        most = {BODIES: options.most_receiving_bytes, REQUESTS: options.most_request_bytes}
        self.bounds = {name: Bound(bound, max(bound // 2, options.max_body_bytes)) for name, bound in most.items()}
        self.held: Counter[str] = Counter()
        self._watched: dict[str, Callable[[], int]] = {}

    def entry(self, client: str) -> Entry:
        entry = Entry(self, client)
        entry.charge(REQUESTS, _LEAST_BYTES)
        return entry

    def watch(self, account: str, read: Callable[[], int]) -> None:
        self._watched[account] = read

    def accounts(self) -> dict[str, int]:
        own = {name: self.held[name] for name in (BODIES, REQUESTS, PROMPTS, OUTPUTS, ANSWERS)}
        return own | {name: read() for name, read in self._watched.items()}


class Entry:
    """The bytes held by a request until `close`."""

    def __init__(self, ledger: Ledger, client: str) -> None:
        self._ledger = ledger
        self._client = client
        self._held: Counter[str] = Counter()

    def __enter__(self) -> Entry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def charge(self, account: str, num_bytes: int) -> None:
        """Charge bytes; raise OverloadedError, charging nothing, at the limit."""
        bound = self._ledger.bounds.get(account)
        if bound is not None:
            before = self._held[account]
            counted = max(0, before + num_bytes - _FREE_BYTES) - max(0, before - _FREE_BYTES)
            if counted and not bound.has_room(self._client, counted):
                raise OverloadedError(_REFUSALS[account], retry_after=1.0)
            bound.add(self._client, counted)
        self._held[account] += num_bytes
        self._ledger.held[account] += num_bytes

    def release(self, account: str) -> None:
        num_bytes = self._held.pop(account, 0)
        self._ledger.held[account] -= num_bytes
        bound = self._ledger.bounds.get(account)
        if bound is not None:
            bound.add(self._client, -max(0, num_bytes - _FREE_BYTES))

    def close(self) -> None:
        for account in tuple(self._held):
            self.release(account)

    def give(self) -> Entry:
        """Move the held bytes to a new entry, which may live longer."""
        given = Entry(self._ledger, self._client)
        given._held, self._held = self._held, Counter()
        return given


def size_of(document: Any) -> int:
    """Return the size of parsed JSON in bytes; equal object keys share memory.

    >>> size_of([1.5] * 2000) - size_of([1] * 2000)
    64000
    """
    num_bytes, waiting, names = 0, [document], set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            num_bytes += sys.getsizeof(value)
            new = [name for name in value if id(name) not in names]
            names.update(map(id, new))
            num_bytes += sum(map(_size_of_text, new))
            waiting += value.values()
        elif isinstance(value, list):
            num_bytes += sys.getsizeof(value)
            if len(value) > _MANY_NUMBERS and types_of(value) <= {int, float}:
                some = value[:: len(value) // _LOOKED_AT]
                num_bytes += len(value) * sum(map(_size_of_number, some)) // len(some)
            else:
                waiting += value
        elif isinstance(value, str):
            num_bytes += _size_of_text(value)
        else:
            num_bytes += _size_of_number(value)
    return num_bytes


def _size_of_text(text: str) -> int:
    return (sys.getsizeof(text) + 15) // 16 * 16


def _size_of_number(value: object) -> int:
    is_shared = value is None or isinstance(value, bool) or (isinstance(value, int) and -5 <= value <= 256)
    return 0 if is_shared else _NUMBER_BYTES
