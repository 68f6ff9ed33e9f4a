"""The ledger's accounts equal the sums of its entries after any events, and are zero once all entries are closed."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import OverloadedError
from jaxllm_server.access.ledger import BODIES, PROMPTS, REQUESTS, Entry, Ledger, size_of
from jaxllm_server.shared.options import ServerOptions

ACCOUNTS = (BODIES, REQUESTS, PROMPTS)
OPTIONS = ServerOptions(max_body_bytes=1 << 20, max_receiving_bytes=2 << 20)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "charge", "charge", "charge", "release", "close", "give"]),
        st.integers(0, 5),
        st.sampled_from(ACCOUNTS),
        st.integers(0, 1 << 20),
    ),
    max_size=60,
)


@given(EVENTS)
@settings(deadline=None, max_examples=200)
def test_accounts_are_the_sums_of_their_entries(events: list[tuple[str, int, str, int]]) -> None:
    ledger = Ledger(OPTIONS)
    entries: list[tuple[Entry, Counter[str]]] = []
    for name, which, account, num_bytes in events:
        if name == "begin" or not entries:
            entries.append((ledger.entry(f"client {which % 2}"), Counter({REQUESTS: size_of_least()})))
            continue
        entry, own = entries[which % len(entries)]
        if name == "charge":
            with suppress(OverloadedError):
                entry.charge(account, num_bytes)
                own[account] += num_bytes
        elif name == "release":
            entry.release(account)
            del own[account]
        elif name == "close":
            entry.close()
            own.clear()
        else:
            entries[which % len(entries)] = entry.give(), own
            entry.close()
        held = {name: sum(each[name] for _, each in entries) for name in ACCOUNTS}
        assert {name: ledger.accounts()[name] for name in ACCOUNTS} == held
        for name, bound in ledger.bounds.items():
            assert bound.total <= bound.most and max(bound.held.values(), default=0) <= bound.share, name
    for entry, _ in entries:
        entry.close()
    assert not any(ledger.accounts().values())
    assert not any(bound.total or bound.held for bound in ledger.bounds.values())


def size_of_least() -> int:
    """Return the size of an empty entry."""
    ledger = Ledger(OPTIONS)
    with ledger.entry(""):
        return ledger.accounts()[REQUESTS]


def test_small_requests_have_room_whatever_others_hold() -> None:
    ledger = Ledger(OPTIONS)
    large = [ledger.entry(client) for client in ("a", "b")]
    for entry in large:
        entry.charge(BODIES, 1 << 20)
    for client in ("a", "c"):
        with ledger.entry(client) as entry:
            entry.charge(BODIES, 30_000)
            with pytest.raises(OverloadedError):
                entry.charge(BODIES, 1 << 20)


@pytest.mark.parametrize(
    "document",
    [
        {"a": "é" * 99_999},
        [float(number) for number in range(20_000)],
        [[f"text {number}"] for number in range(5_000)],
        [{"name": number, "other": None} for number in range(5_000)],
        list(range(20_000)),
    ],
    ids=["text", "numbers", "texts", "objects", "integers"],
)
def test_a_document_is_counted_as_it_lies_in_memory(document: object) -> None:
    """The count of a document equals its memory; tracemalloc omits the allocator's rounding to 16 bytes."""
    text = json.dumps(document)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        read = json.loads(text)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.95 <= size_of(read) / (after - before) <= 1.3
