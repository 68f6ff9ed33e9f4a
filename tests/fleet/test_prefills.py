"""Tests of fleets in which some replicas compute prompts, and others continue them."""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import replace
from typing import Any

import pytest

from jaxllm import LLM, SamplingParams, UserError
from jaxllm.config import EngineConfig
from jaxllm.embedded import MODEL_DIR
from jaxllm.fleet.prefills import Prefills
from jaxllm.fleet.replica import Replica, RoutedRequest
from jaxllm.fleet.router import Router
from jaxllm.metrics import Load, Metrics
from jaxllm.outputs import RequestOutput
from jaxllm.scheduler.state import BlockStored
from tests.fleet.test_processes import SIZES, fleet_of, idle, until
from tests.fleet.test_router import request

CONFIG: dict[str, Any] = {"prefill_replicas": 1, "decode_replicas": 2, "kv_offloading_size": 0.01}


def test_a_prompt_is_computed_once_and_continued_by_a_decoder() -> None:
    """Test where the parts of a request run, when the first part fails, and when it is not worthwhile."""

    async def play() -> None:
        replicas = [Replica(number, is_local=True) for number in range(3)]
        router = Router(replicas, lambda name, error: None)
        prefills = Prefills(EngineConfig(model="m", **CONFIG), router)
        for replica in replicas:
            replica.model = {}
            replica.on_beat("serving", Load(), Metrics())
        roles = [prefills.settings_of(number)["kv_transfer_config"]["kv_role"] for number in range(3)]
        assert roles == ["kv_producer", "kv_consumer", "kv_consumer"]

        async def begun(asked: RoutedRequest) -> asyncio.Future[RoutedRequest | None]:
            waiting = prefills.begin(asked)
            assert waiting is not None
            await asyncio.sleep(0)
            return waiting

        asked = replace(request("a", SamplingParams(n=2, temperature=1.0)), digests=(b"1", b"2"))
        asked = replace(asked, replicas=prefills.decoders, num_sequences=2)
        waiting = await begun(asked)
        (live,) = replicas[0].live.values()
        assert live.request.sent.max_tokens == 1 and live.request.kv_transfer_params == {"do_remote_decode": True}
        name, told = live.request.internal_id, {"remote_port": 7}
        assert not prefills.put("another", None)
        assert prefills.put(name, RequestOutput("a", None, [], finished=True, kv_transfer_params=told))
        routed = await waiting
        assert routed == replace(asked, kv_transfer_params=told) and not replicas[0].live
        router.add(routed)
        assert not replicas[0].live and sum(len(each.live) for each in replicas) == 1

        waiting = await begun(asked)
        assert prefills.put(name, None) and await waiting is None
        waiting = await begun(asked)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not replicas[0].live and not prefills.put(name, None)
        replicas[0].is_drained = True
        assert await (await begun(asked)) is None
        for useless in (replace(asked, digests=()), replace(asked, sent=SamplingParams(prompt_logprobs=1))):
            assert prefills.begin(useless) is None
        router.index.apply(2, [BlockStored(digest, None, (1,)) for digest in asked.digests])
        assert prefills.begin(asked) is None

    asyncio.run(play())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decode_replicas": 0}, "need each other"),
        ({"data_parallel_size": 2}, "the sum of prefill_replicas and decode_replicas is 3"),
        ({"kv_offloading_size": 0.0}, "decode_replicas need kv_offloading_size"),
        ({"prefill_replicas": -1}, "must be an integer from 0"),
    ],
    ids=str,
)
def test_invalid_numbers_of_replicas_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EngineConfig(model="m", **CONFIG | settings)
    assert EngineConfig(model="m", **CONFIG).data_parallel_size == 3


@pytest.mark.ci
async def test_a_fleet_with_prefill_replicas_gives_the_tokens_of_one_engine() -> None:
    """Test also that the loss of the replica that computes prompts ends no request."""
    chance = random.Random(3)
    prompts = [[chance.randrange(3, 1500) for _ in range(chance.randint(3, 70))] for _ in range(24)]
    params = [
        SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=12, ignore_eos=True)
        for number in range(len(prompts))
    ]
    own = {"prefill_replicas": 1, "decode_replicas": 1, "kv_offloading_size": 0.05}
    async with fleet_of(2, **own) as fleet:

        async def ask(number: int) -> list[int]:
            tokens: list[int] = []
            async for output in fleet.generate({"prompt_token_ids": prompts[number]}, params[number], str(number)):
                tokens = list(output.outputs[0].token_ids)
            return tokens

        found = await asyncio.gather(*map(ask, range(16)))
        await until(lambda: idle(fleet))
        sender, receiver = (each.metrics for each in fleet.replicas)
        assert sender.sent_blocks > 50 and receiver.received_blocks > 50 and not receiver.transfer_failures
        process = fleet.replicas[0].process
        assert process is not None
        late = asyncio.gather(*map(ask, range(16, 24)))
        await asyncio.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        found += await late
    with LLM(str(MODEL_DIR), **SIZES) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert found == [list(output.outputs[0].token_ids) for output in outputs]
