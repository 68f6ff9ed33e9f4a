"""An exception in any function called for a request fails that request only; each function is tested."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm import AsyncLLM, SamplingParams
from jaxllm.client.requests import chat_request, generate_request
from jaxllm.errors import RequestFailedError
from jaxllm.sampling_params import RequestOutputKind
from tests.faults.served import Answer, Clients, is_empty, new_server, opened, over_grpc, over_http
from tests.faults.sites import EXCLUDED, MERGE, Injector, Site
from tests.support.grpc_site import one_loop

CHAT = [{"role": "user", "content": "What is 2 + 3?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
STORY = "Once upon a time there was a dog. The dog"


async def ask(clients: Clients) -> list[Answer]:
    """Make six concurrent calls, which together use most features of requests."""
    http, stub = clients
    common: dict[str, Any] = {"seed": 5, "ignore_eos": True}
    return list(
        await asyncio.gather(
            over_http(http, "/v1/completions", common | {
                "prompt": STORY, "n": 2, "max_tokens": 6, "stop": ["zzz", "qqq"], "echo": True, "top_p": 0.9,
                "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 9},
            }),
            over_http(http, "/v1/completions", common | {
                "prompt": [[5, 6, 7], [8, 9]], "max_tokens": 6, "stream": True, "logprobs": 2, "min_tokens": 3,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": True,
            }),
            over_http(http, "/v1/chat/completions", common | {
                "messages": CHAT, "max_tokens": 6, "stream": True, "tools": TOOLS, "top_logprobs": 1, "logprobs": True,
            }),
            over_http(http, "/v1/chat/completions", common | {
                "messages": CHAT, "max_tokens": 6, "logit_bias": {"300": -5.0}, "presence_penalty": 0.5,
                "chat_template_kwargs": {"enable_thinking": False}, "bad_words": ["horse"],
            }),
            over_grpc(stub, generate_request(STORY, common | {
                "max_tokens": 6, "logprobs": 22, "prompt_logprobs": 1, "stop": ["zzz"],
            }), False),
            over_grpc(stub, chat_request(CHAT, common | {"max_tokens": 6, "temperature": 0.0}, is_stream=True), True),
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    with one_loop(seconds=300.0) as run:
        yield run


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # its awaiter has failed
@pytest.mark.ci
def test_a_fault_at_any_call_site_ends_one_request_at_most(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # about 500 tracebacks
    injector = Injector()
    injector.install()
    try:
        run(check(injector))
    finally:
        injector.remove()


async def check(injector: Injector) -> None:
    missing = {*EXCLUDED, MERGE} - set(injector.found)
    assert not missing, f"not in the source: {missing}"
    server = new_server(tool_call_parser="hermes", reasoning_parser="qwen3")
    async with opened(server) as clients:
        expected = await ask(clients)
        assert not any(answer.failure for answer in expected), expected
        injector.counts.clear()
        assert await ask(clients) == expected
        reached = dict(injector.counts)
        failures = {
            site: await fail_at(injector, site, count, clients, expected)
            for site, count in reached.items()
            if site != MERGE
        }
        await fail_to_merge(server.engine, injector)
        await is_empty(server)
        assert server.engine.state == "serving" and server.engine.metrics.finished.get("error")
        assert await ask(clients) == expected
    assert len(failures) > 250 and sum(map(len, failures.values())) > 200, "the faults are seen"


async def fail_to_merge(engine: AsyncLLM, injector: Injector) -> None:
    """Inject a fault while outputs wait for a slow reader, which the calls above rarely reach."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA, stream_interval=1)

    async def read(delay: float) -> int:
        count = 0
        async for output in engine.generate("Once", params):
            count += len(output.outputs[0].token_ids)
            await asyncio.sleep(delay)
        return count

    with injector.armed(MERGE, 0) as has_fired:
        slow, quick = await asyncio.gather(read(0.2), read(0.0), return_exceptions=True)
    assert has_fired() and {type(slow), type(quick)} == {RequestFailedError, int}, (slow, quick)


async def fail_at(
    injector: Injector, site: Site, count: int, clients: Clients, expected: list[Answer]
) -> list[tuple[int, str]]:
    """Fail one of a site's calls, and check the results of all requests; return those that failed."""
    for wait in (count // 2, 0, 0):
        with injector.armed(site, wait) as has_fired:
            async with asyncio.timeout(20.0):  # no call may wait forever
                answers = await ask(clients)
            if has_fired():
                break
    else:
        raise AssertionError(f"{site} was not reached again")
    failed = [(number, answer.failure) for number, answer in enumerate(answers) if answer.failure is not None]
    assert len(failed) <= 1 and {how for _, how in failed} <= {"500", "INTERNAL"}, (site, failed)
    others = [(now, once) for now, once in zip(answers, expected, strict=True) if now.failure is None and now != once]
    assert not others, (site, others)
    return failed
