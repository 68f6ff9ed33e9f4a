"""`examples/ray_serve.py` on a real Ray: streams of two replicas, prefixes, a crash under load, scaling up and down."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxllm.scheduler.state import BlockStored
from tests.ray.conftest import Cluster
from tests.support.sizes import SLOTS

pytest.importorskip("ray")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow

MODEL = "jaxllm-embedded"
WORDS = "the a cat dog sun moon ran sat saw big red little house tree and to in on was happy".split()


def prompt_of(seed: int, num_words: int = 12) -> str:
    draw = random.Random(seed)
    return "Once upon a time " + " ".join(draw.choice(WORDS) for _ in range(num_words))


class Answer:
    """The content of one stream, as its client received it."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.text = ""
        self.finish_reason: str | None = None
        self.error: Exception | None = None


async def stream(client: Any, prompt: str, max_tokens: int, seen: list[Answer] | None = None, **given: Any) -> Answer:
    """Read a stream to its end, or to its error; adds it to `seen` at its first event."""
    raw = await client.completions.with_raw_response.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
        **given,
    )
    answer = Answer(raw.headers["x-jaxllm-replica"])
    try:
        async for chunk in raw.parse():
            if seen is not None and answer not in seen:
                seen.append(answer)
            answer.text += chunk.choices[0].text
            answer.finish_reason = chunk.choices[0].finish_reason
    except Exception as error:
        answer.error = error
    return answer


def client_at(cluster: Cluster) -> Any:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120.0)


async def loads(engines: Any) -> list[float]:
    """Return the number of tokens of each replica."""
    answers = engines.broadcast("record_autoscaling_stats")
    return [each["tokens"] for each in await answers.results_async(timeout_s=30.0)]


async def until(is_so: Callable[[list[float]], bool], engines: Any, seconds: float) -> float:
    """Wait for a condition on the replicas' loads; return the seconds."""
    began = time.monotonic()
    while not is_so(await loads(engines)):
        assert time.monotonic() - began < seconds, f"not so after {seconds} s"
        await asyncio.sleep(0.1)
    return time.monotonic() - began


def pids() -> dict[str, int]:
    """Return the process ids of the replicas, by name."""
    import ray

    found = {}
    for each in ray.util.list_named_actors(all_namespaces=True):
        if each["name"].startswith("SERVE_REPLICA::default#Engine#"):
            actor = ray.get_actor(**each)
            found[each["name"].rpartition("#")[2]] = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
    return found


async def test_more_tokens_are_given_more_replicas_and_fewer_fewer(cluster: Cluster) -> None:
    quick = {"tokens_per_replica": 400, "upscale_delay": 0.5, "downscale_delay": 4, "look_back": 3}
    with cluster.serving(min_replicas=1, max_replicas=3, **quick) as engines:
        client = client_at(cluster)
        stop, last = asyncio.Event(), asyncio.Event()
        answers: list[Answer] = []
        began = time.monotonic()

        async def user(number: int) -> None:
            end = stop if number else last  # the first user continues during scale-down
            while not end.is_set():
                answers.append(await stream(client, prompt_of(number + len(answers)), 200))

        users: list[asyncio.Future[None]] = []
        sizes = [len(await loads(engines))]
        while sizes[-1] < 3:
            if len(users) < 16:
                users.append(asyncio.ensure_future(user(len(users))))  # one more per second
            await asyncio.sleep(1.0)
            sizes.append(len(await loads(engines)))
            assert time.monotonic() - began < 180.0, sizes
        grown = time.monotonic()
        await asyncio.sleep(5.0)
        stop.set()
        await asyncio.gather(*users[1:])
        shrunk = await until(lambda tokens: len(tokens) == 1, engines, 120.0)
        last.set()
        await users[0]
        print(f"3 replicas after {grown - began:.0f} s, 1 again {shrunk:.0f} s after the load")
        assert sizes[0] == 1
        assert not [answer.error for answer in answers if answer.error is not None]
        assert len({answer.replica for answer in answers}) == 3
        assert (await stream(client, "Once upon a time", 8)).error is None


@pytest.fixture(scope="module")
def two(cluster: Cluster) -> Iterator[Any]:
    """Two replicas; yields their handle."""
    with cluster.serving(min_replicas=2, max_replicas=2) as engines:
        yield engines


async def test_two_replicas_answer_streams(cluster: Cluster, two: Any) -> None:
    from jaxllm import LLM, SamplingParams

    prompts = [prompt_of(seed) for seed in range(12)]
    client = client_at(cluster)
    answers = await asyncio.gather(*(stream(client, prompt, 48) for prompt in prompts))
    assert not [answer.error for answer in answers if answer.error is not None]
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert len({answer.replica for answer in answers}) == 2
    with LLM(**SLOTS) as llm:
        params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        alone = llm.generate(prompts, params, use_tqdm=False)
    assert [answer.text for answer in answers] == [output.outputs[0].text for output in alone]

    with pytest.raises(openai.NotFoundError, match="does not exist"):  # the app's errors are unchanged
        await client.completions.create(model="other", prompt="x")
    chat = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "What is 47 + 38?"}], max_tokens=16, temperature=0
    )
    assert "85" in chat.choices[0].message.content


async def test_a_repeated_prefix_reaches_the_replica_that_has_it(cluster: Cluster, two: Any) -> None:
    client = client_at(cluster)
    first: dict[int, str] = {}
    hits, total = 0, 0
    for turn in range(6):
        for family in range(100, 108):
            prompt = f"{prompt_of(family, 60)} {prompt_of(turn, 4)}"  # four or more shared blocks, then another end
            replica = (await stream(client, prompt, 4)).replica
            if family in first:
                hits += replica == first[family]
                total += 1
            else:
                first[family] = replica
        await asyncio.sleep(0.3)  # three times the delay until the router is informed
    assert hits / total >= 0.9, f"{hits} of {total}"
    assert len(set(first.values())) == 2, "one replica has all: nothing was routed"
    print(f"{hits} of {total} repeated prefixes reached the replica that has them")
    report = await two.report.remote(None)
    assert {len(each.tokens) for each in report.events if isinstance(each, BlockStored)} == {16}  # `choose` weighs them


async def test_a_client_that_leaves_takes_its_request_with_it(cluster: Cluster, two: Any) -> None:
    client = client_at(cluster)
    streams = [
        await client.completions.create(
            model=MODEL, prompt=prompt_of(seed), max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        for seed in range(4)
    ]
    whole = [
        asyncio.ensure_future(client.completions.create(model=MODEL, prompt=prompt_of(seed), max_tokens=400))
        for seed in range(4, 8)
    ]
    await asyncio.sleep(0.2)
    assert sum(await loads(two)) > 0
    for each in streams:
        await each.close()
    for each in whole:
        each.cancel()
    seconds = await until(lambda tokens: sum(tokens) == 0, two, 10.0)
    print(f"requests of clients that left are gone after {seconds:.2f} s")


async def test_a_death_under_load_loses_what_it_ran(cluster: Cluster, two: Any) -> None:
    client = client_at(cluster)
    processes = await asyncio.to_thread(pids)
    assert len(processes) == 2
    seen: list[Answer] = []
    prompts = [prompt_of(seed) for seed in range(200, 224)]  # more than the sixteen slots, so that some wait
    running = [asyncio.ensure_future(stream(client, prompt, 400, seen)) for prompt in prompts]
    while len(seen) < 8:
        await asyncio.sleep(0.01)
    victim = seen[0].replica
    os.kill(processes[victim], signal.SIGKILL)
    killed = time.monotonic()
    answers = await asyncio.gather(*running)
    lost = [answer for answer in answers if answer.error is not None]
    assert 0 < len(lost) <= SLOTS["max_num_seqs"], "what it ran, at most; what waited for it was run elsewhere"
    assert {answer.replica for answer in lost} == {victim}
    assert all("has died" in str(answer.error) and answer.text for answer in lost)
    whole = [answer for answer in answers if answer.error is None]
    assert {answer.finish_reason for answer in whole} == {"length"}
    again = await asyncio.gather(*(stream(client, prompt, 8) for prompt in prompts))  # with one replica left
    assert not [answer.error for answer in again if answer.error is not None]
    assert victim not in {answer.replica for answer in again}
    await until(lambda tokens: len(tokens) == 2, two, 60.0)
    print(f"{len(lost)} of {len(prompts)} lost; two replicas again {time.monotonic() - killed:.1f} s after the death")
