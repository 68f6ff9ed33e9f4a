"""Tests that a prompt computed by one engine and continued by another gives one engine's tokens, and loses nothing."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm import LLM, AsyncLLM, LLMEngine, RequestOutput, SamplingParams, UserError
from jaxllm.config import EngineConfig
from jaxllm.engine.features.transfer import consumer, frames, producer
from jaxllm.engine.features.transfer.consumer import Consumer
from jaxllm.engine.features.transfer.feature import KvTransfer
from jaxllm.engine.features.transfer.frames import Block, Fingerprint, FrameError
from jaxllm.engine.features.transfer.leases import Leases
from jaxllm.engine.features.transfer.params import Remote, read
from jaxllm.engine.features.transfer.producer import Producer
from jaxllm.engine.output_streams import merge
from jaxllm.errors import DeadlineError, FeatureDisabledError, RequestFailedError
from jaxllm.kv_transfer_config import KvTransferConfig, TransferOptions
from jaxllm.replay.recording import FileRecorder
from jaxllm.replay.replay import Replay
from tests.support.paths import GOLDEN, STORIES
from tests.support.sizes import SHORT_BLOCKS

KEEP = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_port": None}
DRAFTS = {"method": "draft_model", "model": str(GOLDEN / "qwen3"), "num_speculative_tokens": 3}
SHARDS = {"tensor_parallel_size": 2, "kv_cache_dtype": "int8"}
# The model, and the settings of producer and consumer.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "windows": ("gemma3", {}, {}),
    "latent": ("deepseek-v3", {}, {}),
    "shards": ("gemma3", {"kv_cache_dtype": "int8"}, SHARDS),
    "drafts": ("qwen3", {"speculative_config": DRAFTS}, {"speculative_config": DRAFTS}),
    "cold drafts": ("qwen3", {}, {"speculative_config": DRAFTS}),
    "drafts of the producer": ("qwen3", {"speculative_config": DRAFTS}, {}),
}

MARKS = {"windows": [], "cold drafts": [pytest.mark.slow], "drafts of the producer": [pytest.mark.slow]}


def config_of(model: str, role: str | None = None, transfer: Mapping[str, Any] | None = None, **settings: Any) -> Any:
    own = {} if role is None else {"kv_transfer_config": {"kv_role": role, **(transfer or {})}}
    own |= {} if role in (None, "kv_producer") else {"kv_offloading_size": 0.02}
    sizes = SHORT_BLOCKS | {"num_kv_blocks": 400} | settings | own
    return EngineConfig(model=str(GOLDEN / model), tokenizer=str(STORIES), dtype="float32", **sizes)


@contextmanager
def engines(*configs: EngineConfig) -> Iterator[list[LLMEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(LLMEngine(config))) for config in configs]


def run(engine: LLMEngine, ids: list[int], params: SamplingParams, transfer: Any = None) -> RequestOutput:
    engine.add_request("one", {"prompt_token_ids": ids}, params, kv_transfer_params=transfer)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                return output
    raise AssertionError("no output")


def feature_of(engine: LLMEngine) -> KvTransfer:
    feature = engine.features.by_name["transfer"]
    assert isinstance(feature, KvTransfer)
    return feature


def wait(is_due: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not is_due():
        assert time.monotonic() < until
        time.sleep(0.01)


def check_nothing_is_left(sender: LLMEngine, receiver: LLMEngine) -> None:
    service, pulls, host = feature_of(sender).producer, feature_of(receiver).consumer, receiver.scheduler.state.host
    assert service is not None and pulls is not None and host is not None
    wait(lambda: not len(service.leases) and not service.leases.num_bytes and not pulls.num_live)
    assert not host.held and not host.storing
    for engine in (sender, receiver):
        state = engine.scheduler.state
        assert state.pool.num_available == state.pool.num_blocks and not engine.outputs.groups


@pytest.mark.parametrize("case", [pytest.param(each, marks=MARKS.get(each, [pytest.mark.ci])) for each in CASES])
def test_tokens_are_those_of_one_engine(case: str) -> None:
    model, here, there = CASES[case]
    options = {"kv_connector_extra_config": {"api_key": "secret"}}
    chance = random.Random(1)
    with engines(
        config_of(model, **here | {"speculative_config": None}),
        config_of(model, "kv_producer", options, **here),
        config_of(model, "kv_consumer", options, **there),
    ) as (one, sender, receiver):
        for number, length in enumerate((30, 33, 32, 57, 5, 3)):
            ids = [chance.randrange(3, 120) for _ in range(length)]
            params = SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=20, ignore_eos=True)
            params = replace(params, n=1 + (length == 33))
            first = run(sender, ids, replace(params, n=1, max_tokens=1), KEEP)
            received = receiver.metrics.received_blocks
            output = run(receiver, ids, params, first.kv_transfer_params or {})
            expected = run(one, ids, params)
            assert [own.token_ids for own in output.outputs] == [own.token_ids for own in expected.outputs]
            assert output.num_cached_tokens == (length - 1) // 4 * 4
            assert (receiver.metrics.received_blocks > received) == (length > 4)
        assert not receiver.metrics.transfer_failures and receiver.metrics.compilations_after_ready == 0
        check_nothing_is_left(sender, receiver)


@pytest.mark.ci
def test_a_damaged_lost_or_strange_block_is_computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Test a flipped bit, an ended lease, another model's blocks, and the policy "fail"."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    must = {"kv_load_failure_policy": "fail"}
    recorder = FileRecorder(tmp_path / "log")
    with (
        engines(config_of("qwen3"), config_of("qwen3", "kv_both"), config_of("gemma3", "kv_producer")) as others,
        closing(LLMEngine(config_of("qwen3", "kv_consumer"), recorder=recorder)) as receiver,
        closing(LLMEngine(config_of("qwen3", "kv_consumer", must))) as strict,
    ):
        one, sender, stranger = others

        def transferred(seed: int, source: LLMEngine, receiver: LLMEngine = receiver) -> tuple[RequestOutput, int]:
            ids = random.Random(seed).choices(range(3, 120), k=30)
            told = run(source, ids, replace(params, max_tokens=1), KEEP).kv_transfer_params
            if seed == 2:
                told = {**(told or {}), "remote_request_id": "another"}
            output = run(receiver, ids, params, told)
            assert output.outputs[0].token_ids == run(one, ids, params).outputs[0].token_ids
            return output, receiver.metrics.transfer_failures

        made, count = frames.pack, iter(range(100))

        def damaged(*given: Any) -> bytes:
            frame = bytearray(made(*given))
            frame[-1] ^= next(count) == 3
            return bytes(frame)

        monkeypatch.setattr(producer.frames, "pack", damaged)
        output, failures = transferred(1, sender)
        assert failures == 1 and output.num_cached_tokens == 12  # the prefix before the damaged block
        monkeypatch.undo()
        assert transferred(2, sender)[1] == 2
        assert transferred(3, stranger)[1] == 3
        with pytest.raises(RequestFailedError, match="KV blocks did not arrive"):
            transferred(2, sender, strict)
        assert not strict.outputs.groups and transferred(5, sender, strict)[1] == 0
        assert transferred(6, sender)[1] == 3
        state = receiver.scheduler.state
    *_, last = Replay(tmp_path / "log").moments()
    assert last.difference is None and last.state.num_planned == state.num_planned
    assert last.state.host is not None and state.host is not None
    assert [pool.index for pool in last.state.host.pools] == [pool.index for pool in state.host.pools]


def test_every_flipped_byte_of_a_frame_is_refused() -> None:
    fingerprint, block = Fingerprint(bytes(range(32))), Block(1, bytes(range(32, 64)))
    frame = frames.pack(fingerprint, block, bytes(range(96)), 64)
    sizes = [(96, 0), (64, 32)]
    found, content, has_drafts = frames.unpack(frame, fingerprint, sizes)
    assert (found, bytes(content), has_drafts) == (block, bytes(range(96)), True)
    assert not frames.unpack(frame, Fingerprint(fingerprint.model, bytes(31) + b"d"), sizes)[2]
    for at in range(len(frame)):
        for bit in range(8):
            changed = bytearray(frame)
            changed[at] ^= 1 << bit
            with pytest.raises(FrameError):
                frames.unpack(bytes(changed), fingerprint, sizes)
        with pytest.raises(FrameError):
            frames.unpack(frame[:at], fingerprint, sizes)


def test_leases_end_and_the_buffer_is_bounded() -> None:
    now = 0.0
    leases = Leases(100, 30.0, lambda: now)
    first, second = leases.open(60), leases.open(40)
    assert first is not None and second is not None and leases.open(1) is None
    leases.fill(first, {Block(0, b"a"): bytes(50)})
    assert leases.num_bytes == 90 and leases.find(first.name) is first
    now = 20.0
    assert leases.find(second.name) is second
    now = 31.0
    assert leases.find(first.name) is None and leases.find(second.name) is second and leases.num_bytes == 40
    assert leases.release(second.name) and not leases.release(second.name) and leases.num_bytes == 0
    leases.fill(second, {Block(0, b"a"): bytes(50)})
    assert leases.num_bytes == 0 and not second.blocks and second.is_filled.is_set()


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_heartbeat_renews_the_leases_of_pulls_that_wait(is_alive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test one pull whose blocks arrive slowly and one that waits for a thread; a lease lasts 30 s of a fake clock."""
    now, is_sending, may_send, made, find = [0.0], threading.Event(), threading.Event(), frames.pack, Leases.find
    renewed: set[tuple[str, float]] = set()

    def renew(leases: Leases, name: str) -> Any:
        found = find(leases, name)
        renewed.add((name, now[0]))
        return found

    def slow(*given: Any) -> bytes:
        is_sending.set()
        may_send.wait(10)
        return made(*given)

    monkeypatch.setattr(producer.frames, "pack", slow)
    monkeypatch.setattr(consumer, "PULLS", 1)
    monkeypatch.setattr(producer, "PULLS", 1)  # a heartbeat waits for no pull
    monkeypatch.setattr(Leases, "find", renew)
    layout: Any = SimpleNamespace(sizes=lambda: (1, 0), pack=bytes, unpack=lambda content, _: bytes(content))
    fingerprint = Fingerprint(bytes(32))
    blocks = [Block(0, bytes([number]) * 32) for number in range(3)]
    options = TransferOptions(lease=0.06 if is_alive else 600.0)
    with (
        closing(Producer(KvTransferConfig(kv_role="kv_producer"), fingerprint, [layout], lambda: now[0])) as sender,
        closing(
            Consumer(KvTransferConfig(kv_role="kv_consumer", kv_connector_extra_config=options), fingerprint, [layout])
        ) as receiver,
    ):
        names = [sender.keep(dict.fromkeys(blocks, b"x")) for _ in range(2)]
        pulls = [receiver.pull(Remote(f"127.0.0.1:{sender.port}", str(name)), blocks) for name in names]
        assert is_sending.wait(10)
        for now[0] in (20.0, 40.0):
            if is_alive:
                wait(lambda: renewed >= {(str(name), now[0]) for name in names})
            sender.leases.sweep()
        may_send.set()
        assert [len(pull.result(10)) for pull in pulls] == ([3, 3] if is_alive else [1, 0])


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_aborts_leave_nothing(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test requests that end or are cancelled at any time, on both sides, while blocks arrive slowly."""
    made, chance = frames.pack, random.Random(5)

    def slow(*given: Any) -> bytes:
        time.sleep(0.002)
        return made(*given)

    monkeypatch.setattr(producer.frames, "pack", slow)

    async def read_all(
        engine: AsyncLLM, ids: list[int], params: SamplingParams, transfer: Any, name: str, **limits: float
    ) -> Any:
        last = None
        async for output in engine.generate(ids, params, name, kv_transfer_params=transfer, **limits):
            last = output
        return last

    async def one(number: int, sender: AsyncLLM, receiver: AsyncLLM) -> str | None:
        ids = [chance.randrange(3, 120) for _ in range(40)]
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        try:
            async with asyncio.timeout(chance.choice((0.001, 0.01)) if number % 7 == 3 else 10):
                told = await read_all(sender, ids, replace(params, max_tokens=1), KEEP, f"{number}")
            limits = {("timeout", "time_limit")[number % 2]: 0.01} if number % 5 == 0 else {}
            call = read_all(receiver, ids, params, told.kv_transfer_params, f"{number}", **limits)
            task = asyncio.create_task(call)
            await asyncio.sleep(chance.choice((0, 0.005, 0.02, 0.05)))
            if number % 3 == 0:
                await receiver.abort(f"{number}")
            elif number % 3 == 1:
                task.cancel()
            return (await task).outputs[0].finish_reason
        except DeadlineError:
            return "timeout"
        except (TimeoutError, asyncio.CancelledError):
            return None

    async def play() -> None:
        lease = {"kv_connector_extra_config": {"lease": 1.0}}
        async with (
            AsyncLLM(config_of("gemma3", "kv_producer", lease)) as sender,
            AsyncLLM(config_of("gemma3", "kv_consumer", lease)) as receiver,
        ):
            ends: list[str | None] = []
            for start in range(0, count, 10):
                ends += await asyncio.gather(*(one(start + each, sender, receiver) for each in range(10)))
            assert {"abort", "length", "time_limit", "timeout", None} <= {*ends}
            await asyncio.sleep(0.1)
            await asyncio.to_thread(check_nothing_is_left, sender.engine, receiver.engine)
            assert not receiver.num_live

    asyncio.run(play())


@pytest.mark.ci
def test_lists_of_prompts() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": [*range(first, first + 20)]} for first in (3, 30, 60)]
    with LLM(config_of("qwen3", "kv_producer")) as sender, LLM(config_of("qwen3", "kv_consumer")) as receiver:
        firsts = sender.generate(prompts, replace(params, max_tokens=1), kv_transfer_params=[KEEP] * 3)
        outputs = receiver.generate(prompts, params, kv_transfer_params=[each.kv_transfer_params for each in firsts])
        assert [each.num_cached_tokens for each in outputs] == [16] * 3
        expected = sender.generate(prompts, params)
        assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in expected]
        with pytest.raises(UserError, match="must be the same"):
            sender.generate(prompts, params, kv_transfer_params=[KEEP])


@pytest.mark.ci
def test_tls_and_a_wrong_key(certificates: Path) -> None:
    served = {"tls_certificate": str(certificates / "server.pem"), "tls_key": str(certificates / "server.key")}
    ca = str(certificates / "ca.pem")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with engines(
        config_of("gemma3", "kv_producer", {"kv_connector_extra_config": {**served, "api_key": "right"}}),
        *(
            config_of("gemma3", "kv_consumer", {"kv_connector_extra_config": {"tls_ca": ca, "api_key": key}})
            for key in ("right", "wrong")
        ),
    ) as (sender, *receivers):
        ids = [*range(3, 40)]
        for receiver, failures in zip(receivers, (0, 1), strict=True):
            told = run(sender, ids, replace(params, max_tokens=1), KEEP).kv_transfer_params
            run(receiver, ids, params, {**(told or {}), "remote_host": "localhost"})
            assert receiver.metrics.transfer_failures == failures


@pytest.mark.parametrize(
    ("transfer", "settings", "message"),
    [
        ({}, {}, "kv_role is missing"),
        ({"kv_role": "kv_sender"}, {}, "kv_role must be one of"),
        ({"kv_role": "kv_both"}, {}, "needs kv_offloading_size"),
        ({"kv_role": "kv_producer"}, {"enable_prefix_caching": False}, "needs enable_prefix_caching"),
        ({"kv_role": "kv_producer", "kv_rank": 1}, {}, "it has no 'kv_rank'"),
        ({"kv_role": "kv_producer", "kv_load_failure_policy": "drop"}, {}, "kv_load_failure_policy must be"),
        ({"kv_role": "kv_producer", "kv_port": 70000}, {}, "kv_port must be"),
        ({"kv_role": "kv_producer", "kv_connector_extra_config": {"lease": 0}}, {}, "lease must be"),
        ({"kv_role": "kv_producer", "kv_connector_extra_config": {"tls_key": "k"}}, {}, "need each other"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(transfer: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EngineConfig(model="m", kv_transfer_config=transfer, **settings)


@pytest.mark.parametrize(
    ("role", "given", "message"),
    [
        ("kv_consumer", KEEP, "do_remote_decode needs a producer"),
        ("kv_producer", {"do_remote_prefill": True}, "do_remote_prefill needs a consumer"),
        ("kv_consumer", {"do_remote_prefill": True}, "remote_host must be"),
        ("kv_consumer", {"do_remote_prefill": True, "remote_host": "10.1.1.1"}, "remote_port must be"),
        ("kv_both", {"do_remote_prefill": 1}, "must be true or false"),
        ("kv_both", {"prefill": True}, "it has no 'prefill'"),
        ("kv_both", [], "must be an object"),
        (
            "kv_both",
            {"do_remote_prefill": True, "remote_host": "10.1.1.1", "remote_port": 1, "remote_request_id": "a"},
            "none of the consumer's producers",
        ),
    ],
    ids=str,
)
def test_invalid_requests_are_refused(role: Any, given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(given, KvTransferConfig(kv_role=role, kv_connector_extra_config=TransferOptions()))


def test_a_slow_reader_gets_the_place_of_blocks() -> None:
    pending, told = RequestOutput("a", None, [1]), {"remote_port": 1}
    merge(pending, RequestOutput("a", None, [1], finished=True, kv_transfer_params=told))
    assert pending.finished and pending.kv_transfer_params == told


def test_an_engine_without_transfer_refuses_one() -> None:
    with engines(config_of("gemma3")) as (engine,):
        with pytest.raises(FeatureDisabledError, match="kv_transfer_config"):
            run(engine, [5], SamplingParams(max_tokens=1), KEEP)
        assert run(engine, [5], SamplingParams(max_tokens=1), {}).kv_transfer_params is None
