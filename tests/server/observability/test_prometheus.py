"""Metrics against a table of vLLM's names and buckets, and against a scripted run counted by hand."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.config import EngineConfig
from jaxllm.engine.life_cycle import EngineState
from jaxllm.errors import UnavailableError
from jaxllm.metrics import DeviceReport, Load, Metrics, StepReport
from jaxllm.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm_server.observability.log_stats import Counts, log_stats, stats_line
from jaxllm_server.observability.prometheus import GRPC_ROUTES, HTTP_ROUTES, PrometheusObserver

_TOKENS = "1 2 5 10 20 50 100 200 500 1000"  # 1-2-5 up to max_model_len, here 1500
_REQUEST = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
_BETWEEN = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
# As in vLLM's documentation.
_HISTOGRAMS = {
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "request_max_num_generation_tokens": _TOKENS,
    "request_params_max_tokens": _TOKENS,
    "request_prefill_kv_computed_tokens": _TOKENS,
    "request_params_n": "1 2 5 10 20",
    "request_num_preemptions": "1 2 3 4 5 10 20",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "time_to_first_token_seconds": (".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"),
    "inter_token_latency_seconds": _BETWEEN,
    "request_time_per_output_token_seconds": _BETWEEN,
    "e2e_request_latency_seconds": _REQUEST,
    "request_queue_time_seconds": _REQUEST,
    "request_inference_time_seconds": _REQUEST,
    "request_prefill_time_seconds": _REQUEST,
    "request_decode_time_seconds": _REQUEST,
}
_COUNTERS = (
    "prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens generation_tokens prompt_tokens_cached "
    "forced_tokens adapter_loads images_encoded sounds_encoded sources_encoded external_prefix_cache_hits "
    "kv_offload_stored_blocks kv_offload_failed_blocks "
    "kv_transfer_sent_blocks kv_transfer_received_blocks kv_transfer_failures "
    "kv_disk_stored_blocks kv_disk_read_blocks kv_disk_failures "
    "request_success programs_compiled compile_seconds compilations_after_ready recoveries padded_tokens "
    "computed_tokens steps requests_handled"
).split()
_GAUGES = (
    "num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc cache_config_info "
    "engine_state held_bytes"
).split()


@dataclass
class _Device:
    id: int
    stats: dict[str, int] | None

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


@dataclass
class _Engine:
    """The part of AsyncLLM that the observer reads."""

    metrics: Metrics = field(default_factory=Metrics)
    load: Load = field(default_factory=lambda: Load(max_running=8, kv_blocks_total=200))
    state: EngineState = "serving"
    devices: tuple[_Device, ...] = (_Device(0, None),)
    config: EngineConfig = field(default_factory=lambda: EngineConfig(model="m", num_kv_blocks=200))

    def get_load(self) -> Load:
        return self.load

    @property
    def model(self) -> Any:
        if self.state == "loading":
            raise UnavailableError("The model is still being loaded.")
        return SimpleNamespace(max_model_len=1500)

    def device_report(self) -> DeviceReport | None:
        memory = {str(device.id): device.memory_stats() or {} for device in self.devices}
        return None if self.state == "loading" else DeviceReport(4, 0, 9, memory)


class _Adapters(list[Any]):
    num_finished_others = 0


def _observer(engine: _Engine | None = None) -> PrometheusObserver:
    return PrometheusObserver(engine or _Engine(), "tiny", _Adapters())  # pyright: ignore[reportArgumentType]


def _samples(observer: PrometheusObserver) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return all samples by name and labels, without the labels that every sample has."""
    families = text_string_to_metric_families(observer.render().decode())
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k not in ("model_name", "engine")))): (
            sample.value
        )
        for family in families
        for sample in family.samples
    }


def _value(observer: PrometheusObserver, name: str, **labels: str) -> float:
    return _samples(observer)[f"jaxllm:{name}", tuple(sorted(labels.items()))]


def _request(times: tuple[float, float, float, float], prompt: int, cached: int, *lengths: int) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1] * prompt,
        outputs=[CompletionOutput(i, "", [1] * length, finish_reason="stop") for i, length in enumerate(lengths)],
        finished=True,
        metrics=RequestMetrics(*times),
        num_cached_tokens=cached,
    )


def test_names_types_buckets_and_labels_are_those_of_the_table() -> None:
    families = {family.name: family for family in text_string_to_metric_families(_observer().render().decode())}
    for name, bounds in _HISTOGRAMS.items():
        family = families[f"jaxllm:{name}"]
        assert family.type == "histogram"
        buckets = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")]
        assert [float(bound) for bound in buckets] == [*(float(bound) for bound in bounds.split()), float("inf")], name
        assert all(sample.labels["model_name"] == "tiny" for sample in family.samples)
        assert all(sample.labels["engine"] == "0" for sample in family.samples)
    for name, kind in [*((name, "counter") for name in _COUNTERS), *((name, "gauge") for name in _GAUGES)]:
        family = families[f"jaxllm:{name}"]
        assert family.type == kind, name
        for sample in family.samples:
            assert sample.name == family.name + ("_total" if kind == "counter" else "")
            assert name == "requests_handled" or {"model_name", "engine"} <= sample.labels.keys()
    reasons = [sample.labels["finished_reason"] for sample in families["jaxllm:request_success"].samples]
    assert reasons == list(get_args(FinishReason))
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "python_info", "python_gc_collections"} <= set(
        families
    )
    (info,) = families["jaxllm:cache_config_info"].samples
    assert info.value == 1
    assert (info.labels["block_size"], info.labels["num_gpu_blocks"]) == ("16", "200")


def test_a_scripted_run_is_counted_exactly() -> None:
    engine = _Engine()
    observer = _observer(engine)
    observer.step(StepReport(0.02, num_tokens=40, num_rows=2, num_sampled=2))
    observer.step(StepReport(0.004, num_tokens=2, num_rows=8, num_sampled=2))
    observer.tokens(0.07, 1, is_first=True)
    observer.tokens(0.06, 3, is_first=False)  # three tokens at once, 0.02 s each
    observer.finished(_request((10.0, 10.5, 11.0, 15.0), 30, 16, 5, 3), SamplingParams(n=2, max_tokens=64))
    preempted = _request((10.0, 10.25, 10.5, 10.5), 12, 0, 1)
    preempted.metrics.num_preemptions = 3  # pyright: ignore[reportOptionalMemberAccess]
    observer.finished(preempted, SamplingParams(max_tokens=None))
    engine.metrics.prompt_tokens, engine.metrics.cached_tokens, engine.metrics.generated_tokens = 42, 16, 9
    engine.metrics.finished = {"stop": 2, "length": 1}
    engine.load = Load(running=3, waiting=5, kv_blocks_used=50, kv_blocks_total=200, max_running=8, deferred=2)
    samples = _samples(observer)

    def value(name: str, **labels: str) -> float:
        return samples[f"jaxllm:{name}", tuple(sorted(labels.items()))]

    # The histograms' sums equal the engine's counters.
    assert value("request_prompt_tokens_sum") == value("prompt_tokens_total") == 42
    assert value("request_generation_tokens_sum") == value("generation_tokens_total") == 9
    assert value("request_prefill_kv_computed_tokens_sum") == 42 - value("prompt_tokens_cached_total") == 26
    assert value("request_generation_tokens_count") == 3
    assert value("request_max_num_generation_tokens_sum") == 6
    assert value("request_success_total", finished_reason="stop") == 2
    assert value("request_success_total", finished_reason="abort") == 0
    assert value("prefix_cache_queries_total") == 42 and value("prefix_cache_hits_total") == 16
    assert value("request_params_n_sum") == 3 and value("request_params_max_tokens_count") == 1

    assert value("time_to_first_token_seconds_bucket", le="0.06") == 0
    assert value("time_to_first_token_seconds_bucket", le="0.08") == 1
    assert value("inter_token_latency_seconds_count") == 3
    assert value("inter_token_latency_seconds_bucket", le="0.01") == 0
    assert value("inter_token_latency_seconds_bucket", le="0.025") == 3
    assert value("inter_token_latency_seconds_sum") == pytest.approx(0.06)
    assert value("request_time_per_output_token_seconds_count") == 1  # undefined for a single token
    assert value("request_time_per_output_token_seconds_sum") == 1.0  # four seconds for four tokens
    assert value("e2e_request_latency_seconds_sum") == 5.5
    assert value("request_queue_time_seconds_sum") == 0.75
    assert value("request_prefill_time_seconds_sum") == 0.75
    assert value("request_decode_time_seconds_sum") == 4.0
    assert value("request_inference_time_seconds_sum") == 4.75
    assert value("iteration_tokens_total_sum") == 42
    assert value("iteration_tokens_total_bucket", le="8.0") == 1
    assert value("batch_occupancy_sum") == 1.25 and value("batch_occupancy_bucket", le="0.25") == 1
    assert value("step_seconds_sum") == pytest.approx(0.024)
    assert value("num_requests_running") == 3 and value("num_requests_waiting") == 5
    assert value("num_requests_waiting_by_reason", reason="capacity") == 3
    assert value("num_requests_waiting_by_reason", reason="deferred") == 2
    assert value("request_num_preemptions_sum") == 3 and value("request_num_preemptions_bucket", le="2.0") == 1
    assert value("kv_cache_usage_perc") == 0.25
    assert value("programs_ready") == 4 and value("programs_possible") == 9


def test_adapters_are_named_in_vllms_metric_and_their_requests_counted() -> None:
    engine = _Engine(config=EngineConfig(model="m", enable_lora=True, max_loras=3))
    engine.metrics.adapter_loads = 4
    engine.load = Load(running_adapters=("a", "b"), waiting_adapters=("b",))
    observer = _observer(engine)
    observer.adapters = served = _Adapters(  # pyright: ignore[reportAttributeAccessIssue]
        [SimpleNamespace(name=name, num_finished=count) for name, count in (("a", 5), ("other", 1))]
    )
    served.num_finished_others = 2
    labels = {"max_lora": "3", "running_lora_adapters": "a,b", "waiting_lora_adapters": "b"}
    assert _value(observer, "lora_requests_info", **labels) == pytest.approx(time.time(), abs=60)
    assert _value(observer, "adapter_loads_total") == 4
    found = {dict(own)["lora_name"]: n for (name, own), n in _samples(observer).items() if "requests_finished" in name}
    assert found == {"a": 5, "other": 3}
    assert not any("lora" in name for name, _ in _samples(_observer())), "nothing of them where there are none"


def test_a_value_on_a_bound_belongs_to_its_bucket_and_all_values_to_the_last() -> None:
    observer = _observer()
    for length in (1, 2, 3, 1000, 1001):
        observer.finished(_request((0.0, 0.0, 0.0, 0.0), 1, 0, length), SamplingParams())
    samples = _samples(observer)
    counts = {
        dict(labels)["le"]: value
        for (name, labels), value in samples.items()
        if name == "jaxllm:request_generation_tokens_bucket"
    }
    assert (counts["1.0"], counts["2.0"], counts["5.0"], counts["1000.0"], counts["+Inf"]) == (1, 2, 3, 4, 5)


def test_a_request_that_never_ran_has_no_times() -> None:
    observer = _observer()
    output = _request((1.0, 1.0, 1.0, 1.0), 4, 0, 0)
    output.metrics = RequestMetrics(1.0)
    output.num_cached_tokens = None
    observer.finished(output, SamplingParams())
    assert _value(observer, "request_prompt_tokens_count") == 1
    for name in ("e2e_request_latency", "request_queue_time", "request_time_per_output_token"):
        assert _value(observer, f"{name}_seconds_count") == 0


def test_device_memory_is_the_devices_and_on_a_cpu_the_process() -> None:
    devices = tuple(_Device(i, {"bytes_in_use": i, "bytes_limit": 9, "num_allocs": 1}) for i in (3, 5))
    observer = _observer(_Engine(devices=devices))
    assert _value(observer, "device_memory_bytes", device="5", kind="in_use") == 5
    assert _value(observer, "device_memory_bytes", device="3", kind="limit") == 9
    assert not any(dict(labels).get("kind") == "peak" for _, labels in _samples(observer))
    assert _value(_observer(), "device_memory_bytes", device="cpu", kind="in_use") > 10e6


def test_scraping_works_while_the_model_is_being_loaded_and_after_its_death() -> None:
    engine = _Engine(state="loading")
    observer = _observer(engine)
    observer.request_handled("http", "/health", 503, 0.001)
    names = {name for name, _ in _samples(observer)}
    assert "jaxllm:prompt_tokens_total" in names and "jaxllm:step_seconds_count" not in names
    assert _value(observer, "engine_state", state="loading") == 1
    engine.state = "dead"
    assert _value(observer, "engine_state", state="dead") == 1
    assert _value(observer, "step_seconds_count") == 0


def test_what_clients_send_adds_no_series() -> None:
    observer = _observer()
    for route in HTTP_ROUTES:
        observer.request_handled("http", route, 200, 0.01)
    for route in GRPC_ROUTES:
        observer.request_handled("grpc", f"/{route}", "OK", 0.01)
    for protocol in ("http", "grpc"):
        observer.request_handled(protocol, "/nowhere", "other", 0.01)
    before = len(observer.render())
    rng = random.Random(0)
    for _ in range(10_000):
        route = "/" + "".join(rng.choices("ab/{}\n\"é'", k=rng.randrange(12)))
        observer.request_handled("http", route, rng.choice([404, 405]), rng.random())
        observer.request_handled("grpc", route, rng.choice([str(rng.random()), "UNIMPLEMENTED"]), 0.1)
    assert len(observer.render()) - before < 1024
    assert _value(observer, "requests_handled_total", protocol="http", route="/tokenize", code="200") == 1
    route = "jaxllm.v1.InferenceService/StreamGenerate"
    assert _value(observer, "requests_handled_total", protocol="grpc", route=route, code="OK") == 1
    samples = _samples(observer)
    handled = [value for (name, _), value in samples.items() if name == "jaxllm:requests_handled_total"]
    assert sum(handled) == 20_002 + len(HTTP_ROUTES) + len(GRPC_ROUTES)
    counted = [value for (name, _), value in samples.items() if name == "jaxllm:request_handling_seconds_count"]
    assert sum(counted) == sum(handled)


def test_a_line_tells_what_happened_in_between_in_the_words_of_vllm() -> None:
    load = Load(running=3, waiting=2, kv_blocks_used=25, kv_blocks_total=200, prefix_hit_rate=0.125)
    line = stats_line(Counts(10.0, 100, 50, 1000), Counts(20.0, 300, 100, 1255), load)
    assert line == (
        "Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 25.5 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 25.0%"
    )
    decoding = stats_line(Counts(10.0, 300, 100, 1000), Counts(20.0, 300, 100, 1001), load)
    assert decoding is not None and decoding.endswith("Prefix cache hit rate: 12.5%")
    same = Counts(10.0, 300, 100, 1000)
    assert stats_line(same, same._replace(seconds=20.0), Load(kv_blocks_used=7)) is None
    assert stats_line(same, same._replace(seconds=20.0), Load(waiting=1)) is not None


async def test_lines_come_while_there_is_traffic_and_stop_with_it() -> None:
    engine = _Engine()
    lines: list[str] = []
    task = asyncio.create_task(log_stats(engine, 0.02, lines.append))
    await asyncio.sleep(0.07)
    assert lines == []
    engine.metrics.generated_tokens += 5
    while not lines:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.07)
    task.cancel()
    await log_stats(engine, 0.0, lines.append)  # off: returns at once
    assert len(lines) == 1 and "Avg generation throughput: " in lines[0]
