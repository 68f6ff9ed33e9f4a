"""A stream of texts without gRPC; tests/server/grpc/test_pooling.py tests its flow."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm import errors
from jaxllm_server.access.ledger import Ledger
from jaxllm_server.pooling import pool_stream
from jaxllm_server.pooling.pool_calls import PoolCall
from jaxllm_server.shared.options import ServerOptions


class Message:
    """Stand-in for the memory of a call, for example a message of megabytes."""


@pytest.mark.parametrize("is_of_requests", [True, False])
def test_a_failure_leaves_no_cycle_that_holds_the_call(is_of_requests: bool) -> None:
    async def requests(message: Message) -> AsyncIterator[Message]:
        yield message
        if is_of_requests:
            raise errors.DeadlineError("It came late.")
        await asyncio.sleep(3600)

    async def pool(call: PoolCall) -> AsyncIterator[Any]:
        if not is_of_requests:
            raise errors.EngineDeadError("It died.")
        await asyncio.sleep(3600)
        yield

    async def read(_: Message) -> PoolCall:
        return PoolCall(inputs=["a"])

    async def fail(message: Message) -> None:
        serving: Any = SimpleNamespace(ledger=Ledger(ServerOptions()))
        stream = pool_stream.answers(serving, pool, requests(message), read, "c")
        with pytest.raises(errors.EngineError, match=r"^It (came late|died)\.$"):
            await anext(stream)
        await asyncio.sleep(0)

    gc.disable()
    try:
        message = Message()
        alive = weakref.ref(message)
        asyncio.run(fail(message))
        del message
        assert alive() is None
    finally:
        gc.enable()
