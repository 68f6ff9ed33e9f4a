"""One event loop for all tests of a module; coroutines run on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from tests.support.grpc_site import one_loop


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Awaitable[Any]], Any]]:
    with one_loop() as run_on_it:
        yield run_on_it
