"""Engines in several processes with one front end: the same tokens as from one engine, and no lost request.

The engines run the embedded model; three processes share the machine's cores.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, PoolingParams, RequestOutputKind, SamplingParams, UserError
from jaxllm.beam_search_params import BeamSearchParams
from jaxllm.embedded import EMBEDDER_DIR, MODEL_DIR
from jaxllm.errors import EngineDeadError, UnavailableError
from jaxllm.fleet import supervisor, wire
from jaxllm.fleet.fleet_llm import FleetLLM
from jaxllm.metrics import Load, Metrics
from jaxllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxllm.scheduler.state import AllBlocksCleared, BlockRemoved, BlockStored
from tests.engine.test_combinations import Answer, check_equal, combination

VOCABULARY = 1536
PROCESSORS = ["tests.engine.test_combinations:scale", "tests.engine.test_combinations:ban_above"]
SIZES: dict[str, Any] = {
    **{"max_num_seqs": 16, "max_num_batched_tokens": 64, "block_size": 4, "num_kv_blocks": 200, "max_logprobs": -1},
    **{"max_model_len": 128, "precompile": "covering"},
}
BOUND = 2.0  # seconds within which a hang is detected
LEAST_HITS, MOST_SHARE = 0.9, 1.2


def test_what_replicas_say_is_what_is_heard() -> None:
    completion = CompletionOutput(0, "é", [1, 2], -0.5, [{1: Logprob(-0.25, 1, "a")}], "stop", "</s>", 2**63)
    said = [
        combination(7),
        SamplingParams(structured_outputs={"regex": "a+"}, output_kind=RequestOutputKind.DELTA),
        PoolingParams(dimensions=8),
        BeamSearchParams(beam_width=2, max_tokens=3),
        RequestOutput("r", None, (1, 2), [completion], True, RequestMetrics(1.5), 3, [None, {4: Logprob(-1.0)}]),
        Load(running=1, running_adapters=("a",)),
        Metrics(steps=3, finished={"stop": 2}, accepted_tokens=[1]),
        [BlockStored(b"d", None, (1, 2)), BlockRemoved(b"d"), AllBlocksCleared()],
        {"ids": frozenset({3, 1}), 5: ("tuple", ["list"])},
    ]
    heard = wire.unpack(wire.pack(said))
    assert heard == said
    for mine, theirs in zip(heard, said, strict=True):
        assert type(mine) is type(theirs)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(wire.unpack(wire.pack(array)), array)
    error = wire.unpack(wire.pack(UserError("no", "prompt", 3)))
    assert (type(error), str(error), error.parameter) == (UserError, "no", "prompt")
    with pytest.raises(TypeError, match="cannot be sent"):
        wire.pack(object())


@asynccontextmanager
async def fleet_of(count: int, **settings: Any) -> AsyncIterator[FleetLLM]:
    own = {name: settings.pop(name) for name in ("module", "hang_timeout") if name in settings}
    bounds = {"max_queued_requests": 1 << 20, "max_queued_tokens": 1 << 30}
    model = settings.pop("model", str(MODEL_DIR))
    async with FleetLLM(model, data_parallel_size=count, **bounds, **own, **SIZES | settings) as fleet:
        yield fleet


def prompt(number: int) -> list[int]:
    """Make a prompt; each group of ten consecutive numbers shares its first tokens."""
    draws = np.random.default_rng([number // 10, 1]), np.random.default_rng([number, 2])
    return [each for own, count in zip(draws, (12, 20), strict=True) for each in own.integers(3, 1500, count).tolist()]


async def ask(fleet: FleetLLM, number: int, params: SamplingParams, most: int | None = None) -> Answer:
    """Collect the first `most` outputs of a request."""
    answer = Answer()
    outputs = fleet.generate({"prompt_token_ids": prompt(number)}, params, str(number))
    async with aclosing(outputs):
        async for output in outputs:
            answer.add(output, params.output_kind)
            if answer.num_outputs == most:
                break
    return answer


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.ci
def test_a_fleet_gives_the_tokens_of_one_engine(count: int) -> None:
    params = [combination(number, VOCABULARY) for number in range(count)]
    leaves = {number for number in range(count) if number % 10 == 9}

    async def run() -> list[Answer]:
        async with fleet_of(2, logits_processors=PROCESSORS) as fleet:
            found = await asyncio.gather(
                *(ask(fleet, number, own, 1 if number in leaves else None) for number, own in enumerate(params))
            )
            assert all(each.metrics.generated_tokens > 0 for each in fleet.replicas), "both have worked"
            await until(lambda: idle(fleet))
            return found

    found = asyncio.run(run())
    with LLM(str(MODEL_DIR), logits_processors=PROCESSORS, **SIZES) as llm:
        alone = [Answer() for _ in params]
        for number, own in enumerate(params):
            llm.engine.add_request(str(number), {"prompt_token_ids": prompt(number)}, own)
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step():
                alone[int(output.request_id)].add(output, params[int(output.request_id)].output_kind)
    for number, (mine, theirs) in enumerate(zip(found, alone, strict=True)):
        if number not in leaves:
            check_equal(number, mine, theirs)
        else:  # a client that disconnected got a prefix of the answer
            for index, told in mine.samples.items():
                assert theirs.samples[index].token_ids[: len(told.token_ids)] == told.token_ids


def idle(fleet: FleetLLM) -> bool:
    """Return whether all replicas serve, and hold no block for a request."""
    loads = [each.get_load() for each in fleet.replicas]
    return all(each.takes_work for each in fleet.replicas) and not any(
        load.running or load.waiting or load.kv_blocks_used for load in loads
    )


async def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.05)


@pytest.mark.ci
async def test_prefixes_find_their_replica_and_tokens_are_spread() -> None:
    """Twenty prefixes of 64 tokens, a few of them much more frequent than the others."""
    draws = random.Random(0)
    prefixes = [[draws.randrange(3, 1500) for _ in range(64)] for _ in range(20)]
    asked = draws.choices(prefixes, [1 / (rank + 1) for rank in range(20)], k=300)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    async with fleet_of(2, num_kv_blocks=2000) as fleet:
        seen: set[int] = set()
        repeated = 0

        async def one(prefix: list[int]) -> None:
            ids = [*prefix, *(draws.randrange(3, 1500) for _ in range(8))]
            async for _ in fleet.generate({"prompt_token_ids": ids}, greedy):
                pass

        for start in range(0, len(asked), 12):
            some = asked[start : start + 12]
            repeated += sum(id(prefix) in seen for prefix in some)
            await asyncio.gather(*map(one, some))
            seen |= set(map(id, some))
        hits = fleet.metrics.cached_tokens / 64
        assert hits >= LEAST_HITS * repeated, (hits, repeated)
        done = [each.metrics.prompt_tokens + each.metrics.generated_tokens for each in fleet.replicas]
        print(f"{hits / repeated:.2f} of repeated prefixes were found, tokens {done}")
        assert max(done) <= MOST_SHARE * sum(done) / len(done)


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.ci
def test_a_replica_that_dies_stops_or_hangs_costs_only_what_it_has_answered(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LONGEST_WAIT", supervisor.FIRST_WAIT)  # constant waits between restarts
    draws = random.Random(count)
    ended: dict[str, int] = {"whole": 0, "lost": 0}

    async def client(fleet: FleetLLM, name: int, stop: asyncio.Event) -> None:
        number = name
        while not stop.is_set():
            number += 1000
            kind = RequestOutputKind.DELTA if name % 2 else RequestOutputKind.FINAL_ONLY
            params = SamplingParams(seed=number, max_tokens=30, ignore_eos=True, output_kind=kind)
            began, tokens = time.monotonic(), 0
            try:
                async for output in fleet.generate({"prompt_token_ids": prompt(number)}, params):
                    tokens += len(output.outputs[0].token_ids)
                assert tokens == 30, "a request ends with all of its tokens, or with an error"
                ended["whole"] += 1
            except UnavailableError:
                ended["lost"] += 1
                await asyncio.sleep(0.1)
            assert time.monotonic() - began < BOUND + 20.0

    async def run() -> None:
        async with fleet_of(3, module="tests.fleet.faulty_node", hang_timeout=BOUND) as fleet:
            stop = asyncio.Event()
            clients = [asyncio.ensure_future(client(fleet, name, stop)) for name in range(12)]
            for turn in range(count):
                await until(lambda: any(each.takes_work and each.live for each in fleet.replicas))
                replica = draws.choice([each for each in fleet.replicas if each.takes_work and each.live])
                starts, process = replica.num_starts, replica.process
                assert process is not None
                os.kill(process.pid, (signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1)[turn % 3])
                await until(lambda each=replica, before=starts: each.num_starts > before, BOUND + 10.0)
            await until(lambda: all(each.takes_work for each in fleet.replicas))
            stop.set()
            await asyncio.gather(*clients)
            await until(lambda: idle(fleet))

    asyncio.run(run())
    print(ended)
    assert ended["whole"] > 20 * count


@pytest.mark.ci
async def test_a_replica_is_drained_and_started_anew() -> None:
    async with fleet_of(2) as fleet:
        params = SamplingParams(seed=1, max_tokens=90, ignore_eos=True)
        running = [asyncio.ensure_future(ask(fleet, number, params)) for number in range(8)]
        await until(lambda: all(each.live for each in fleet.replicas))
        await fleet.drain_replica(0)
        answers = await asyncio.gather(*running)
        assert all(len(each.samples[0].token_ids) == 90 for each in answers)
        await until(lambda: idle(fleet))
        assert [each.num_starts for each in fleet.replicas] == [2, 1]
        with pytest.raises(UserError, match="replica must be 0 to 1"):
            await fleet.drain_replica(2)
        await fleet.pause()
        assert fleet.state == "paused"
        with pytest.raises(UnavailableError, match="paused"):
            await ask(fleet, 1, params)
        await fleet.resume()
        assert await fleet.reset_prefix_cache()
        with pytest.raises(UserError, match="stop_token_ids"):  # the replica refuses it
            await ask(fleet, 1, dataclasses.replace(params, stop_token_ids=[1 << 20]))
        assert await fleet.drain(5.0)


def test_a_model_that_cannot_be_loaded_ends_the_start() -> None:
    async def run() -> None:
        async with fleet_of(2, model="/nowhere"):
            pass

    with pytest.raises((UserError, EngineDeadError), match="nowhere"):
        asyncio.run(run())


@pytest.mark.ci
def test_offline() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    texts = [f"Once upon a time {name}" for name in ("Tom", "Lily", "a dog", "the sun", "Anna")]
    with LLM(**SIZES) as one, LLM(data_parallel_size=2, **SIZES) as two:
        wanted, found = one.generate(texts, greedy, use_tqdm=False), two.generate(texts, greedy, use_tqdm=False)
        assert [each.outputs[0].text for each in found] == [each.outputs[0].text for each in wanted]
        question = [{"role": "user", "content": "What is 47 + 38?"}]
        assert two.chat(question, greedy)[0].outputs[0].text == one.chat(question, greedy)[0].outputs[0].text
        beams = BeamSearchParams(beam_width=2, max_tokens=6)
        assert two.beam_search(texts[0], beams) == one.beam_search(texts[0], beams)
        with pytest.raises(UserError, match="stop_token_ids"):  # without a running replica
            two.generate(texts, [greedy] * 4 + [SamplingParams(stop_token_ids=[1 << 20])])
        assert two.generate(texts[:1], greedy, use_tqdm=False)[0].outputs[0].text == wanted[0].outputs[0].text
    with LLM(str(EMBEDDER_DIR)) as one, LLM(str(EMBEDDER_DIR), data_parallel_size=2) as two:
        for mine, theirs in zip(one.embed(texts), two.embed(texts), strict=True):
            np.testing.assert_allclose(mine.outputs.embedding, theirs.outputs.embedding, atol=1e-6)
