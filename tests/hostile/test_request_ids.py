"""A hundred concurrent calls with the same id: request ids are the client's names, not the server's.

Also checks the documentation of ids in both protocols.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from jaxllm.v1 import control_pb2, inference_pb2
from tests.hostile.conftest import wait_idle
from tests.support.failures import Grpc
from tests.support.serving_process import ServingProcess

pytestmark = pytest.mark.ci
NUM_CALLS = 100
ID = "the-same"
LENGTH = 40
ASKED: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": LENGTH, "ignore_eos": True, "temperature": 1.0}


async def test_a_hundred_equal_ids_over_grpc_of_which_one_is_aborted(server: ServingProcess) -> None:
    """An id in the metadata is a hint: one call gets it, the others derived ones, and Abort ends that one."""

    start = len(server.log)

    async with grpc.aio.insecure_channel(server.grpc) as channel:
        rpc = Grpc(channel)
        began = asyncio.Semaphore(0)

        async def one(seed: int) -> tuple[str, list[int], int]:
            length = LENGTH if seed else 10 * LENGTH  # the first one gets the id, and lasts longer
            request = inference_pb2.GenerateRequest(
                text=ASKED["prompt"], sampling={"seed": seed}, stop={"max_tokens": length, "ignore_eos": True}
            )
            call = rpc.inference.StreamGenerate(request, metadata=(("x-request-id", ID),), timeout=60)
            own, ids, reason = "", [], 0
            async for message in call:
                own = own or message.request_id
                for delta in message.deltas:
                    ids += delta.token_ids
                    reason = delta.finish_reason or reason
                began.release()
            return own, ids, reason

        calls = [asyncio.ensure_future(one(0))]
        await began.acquire()
        calls += [asyncio.ensure_future(one(seed)) for seed in range(1, NUM_CALLS)]
        while sum(f"request {ID}-" in line for line in server.log[start:]) < NUM_CALLS - 1:
            await asyncio.sleep(0.001)  # a later one would get the id, which is free again
        await rpc.control.Abort(control_pb2.AbortRequest(request_ids=[ID]))
        answers = await asyncio.gather(*calls)
    assert len({own for own, _, _ in answers}) == NUM_CALLS
    assert sum(own == ID for own, _, _ in answers) == 1 and all(own.startswith(ID) for own, _, _ in answers)
    assert answers[0][0] == ID and answers[0][2] == 5 and len(answers[0][1]) < 10 * LENGTH  # FINISH_REASON_ABORTED
    assert all(len(ids) == LENGTH and reason != 5 for _, ids, reason in answers[1:])
    assert len({tuple(ids[:20]) for _, ids, _ in answers}) > 90


async def test_an_id_in_the_request_itself_is_one_requests_at_a_time(server: ServingProcess) -> None:
    """Abort uses it, so a second request with the same id is refused at once; the first is unaffected."""

    async with (
        httpx.AsyncClient(base_url=server.http, timeout=60) as http,
        grpc.aio.insecure_channel(server.grpc) as channel,
    ):
        body = ASKED | {"request_id": ID, "max_tokens": 200}
        over_http = [http.post("/v1/completions", json=body) for _ in range(NUM_CALLS // 2)]
        statuses = [answer.status_code for answer in await asyncio.gather(*over_http)]
        request = inference_pb2.GenerateRequest(text="a", request_id=ID, stop={"max_tokens": 200, "ignore_eos": True})
        calls = [Grpc(channel).inference.Generate(request, timeout=60) for _ in range(NUM_CALLS // 2)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        codes = [own.code().name if isinstance(own, grpc.aio.AioRpcError) else "OK" for own in found]
    assert set(statuses) == {200, 409} and set(codes) == {"OK", "ALREADY_EXISTS"}
    wait_idle(server)
