"""Prometheus metrics: vLLM's families with prefix `jaxllm:`, and further ones.

Names, buckets and labels are vLLM's (v1/metrics/loggers.py). Label values are from closed sets, so clients cannot
create series. Used on the event loop, never waiting for the engine.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Protocol, get_args

import psutil
from google.rpc import code_pb2
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxllm.engine.engine_client import EngineView
from jaxllm.engine.life_cycle import EngineState
from jaxllm.errors import EngineError
from jaxllm.metrics import Load, Metrics, StepReport
from jaxllm.outputs import FinishReason, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.v1 import control_pb2, inference_pb2

OTHER = "other"  # label of values outside the closed sets
HTTP_ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/messages",
    "/v1/messages/count_tokens",
    *(f"/api/{name}" for name in ("chat", "generate", "embed", "show", "tags", "ps", "version")),
    "/v1/responses",
    "/v1/responses (WebSocket)",
    "/v1/responses/compact",
    "/v1/responses/input_tokens",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/v1/responses/{response_id}/input_items",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/inference/v1/generate",
    *("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused", "/weight_info"),
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    "/v1/models",
    "/v1/models/{model}",
    "/tokenize",
    "/detokenize",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/health",
    "/live",
    "/ready",
    "/ping",
    "/invocations",
    "/tokenizer_info",
    "/",
    "/openapi.json",
    "/docs",
    "/version",
    "/load",
    "/drain",
    "/metrics",
)
GRPC_ROUTES = tuple(
    f"{service.full_name}/{method.name}"
    for file in (inference_pb2.DESCRIPTOR, control_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
)
CLIENT_GONE = 499  # nginx's, not in HTTPStatus
_ROUTES = MappingProxyType({"http": frozenset(HTTP_ROUTES), "grpc": frozenset(GRPC_ROUTES)})
_CODES = MappingProxyType(
    {
        "http": frozenset([str(CLIENT_GONE), *(str(int(status)) for status in HTTPStatus)]),
        "grpc": frozenset(code_pb2.Code.keys()),
    }
)

_TOKENS = tuple(digit * 10**power for power in range(9) for digit in (1, 2, 5))
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_STEP = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_HANDLING = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_SHARE = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)

# Name, documentation, buckets.
HISTOGRAMS: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS),
    ("request_generation_tokens", "Generated tokens of an output.", _TOKENS),
    ("request_max_num_generation_tokens", "Generated tokens of the longest output of a request.", _TOKENS),
    ("request_params_max_tokens", "The max_tokens parameter of a request.", _TOKENS),
    ("request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached.", _TOKENS),
    ("request_params_n", "The n parameter of a request.", (1, 2, 5, 10, 20)),
    ("request_num_preemptions", "Preemptions of a request.", (1, 2, 3, 4, 5, 10, 20)),
    (
        "iteration_tokens_total",
        "Prompt tokens computed and tokens generated in an engine step.",
        (1, *(2**power for power in range(3, 15))),
    ),
    ("time_to_first_token_seconds", "Seconds from arrival to the first token.", _FIRST_TOKEN),
    ("inter_token_latency_seconds", "Seconds between two tokens of a request.", _BETWEEN_TOKENS),
    ("request_time_per_output_token_seconds", "Mean seconds of a request's tokens after its first.", _BETWEEN_TOKENS),
    ("e2e_request_latency_seconds", "Seconds from arrival to the end of a request.", _REQUEST),
    ("request_queue_time_seconds", "Seconds from arrival to the first step of a request.", _REQUEST),
    ("request_inference_time_seconds", "Seconds from the first step to the end of a request.", _REQUEST),
    ("request_prefill_time_seconds", "Seconds from the first step to the first token.", _REQUEST),
    ("request_decode_time_seconds", "Seconds from the first token to the end of a request.", _REQUEST),
    ("step_seconds", "Seconds of an engine step.", _STEP),
    ("batch_occupancy", "Requests in an engine step, as a share of the maximum.", _SHARE),
)
COUNTERS: tuple[tuple[str, str, Callable[[Metrics], float]], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda own: own.prompt_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda own: own.cached_tokens),
    ("external_prefix_cache_hits", "Tokens loaded from the host's tier.", lambda own: own.loaded_tokens),
    ("kv_offload_stored_blocks", "KV blocks copied to the host's tier.", lambda own: own.offloaded_blocks),
    ("kv_offload_failed_blocks", "Failed copies of KV blocks to the host's tier.", lambda own: own.offload_failures),
    ("kv_transfer_sent_blocks", "KV blocks kept for other engines.", lambda own: own.sent_blocks),
    ("kv_transfer_received_blocks", "KV blocks of other engines.", lambda own: own.received_blocks),
    (
        "kv_transfer_failures",
        "Requests that lack KV blocks of another engine.",
        lambda own: own.transfer_failures,
    ),
    ("kv_disk_stored_blocks", "KV blocks written to the disk's tier.", lambda own: own.disk_stored_blocks),
    ("kv_disk_read_blocks", "KV blocks read from the disk's tier.", lambda own: own.disk_read_blocks),
    ("kv_disk_failures", "Failed writes and reads of the disk's tier.", lambda own: own.disk_failures),
    ("num_preemptions", "Preemptions of requests, which were computed again.", lambda own: own.preemptions),
    ("prompt_tokens", "Prompt tokens of started requests.", lambda own: own.prompt_tokens),
    ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", lambda own: own.cached_tokens),
    ("generation_tokens", "Generated tokens.", lambda own: own.generated_tokens),
    ("forced_tokens", "Generated tokens that a grammar determined, without sampling.", lambda own: own.forced_tokens),
    ("steps", "Engine steps.", lambda own: own.steps),
    ("computed_tokens", "Tokens computed for requests.", lambda own: own.computed_tokens),
    ("padded_tokens", "Tokens computed, including padding.", lambda own: own.padded_tokens),
    ("adapter_loads", "LoRA adapters loaded onto the devices.", lambda own: own.adapter_loads),
    ("images_encoded", "Images encoded by the vision tower.", lambda own: own.images_encoded),
    ("sounds_encoded", "Sounds, or their pieces, encoded by the tower.", lambda own: own.sounds_encoded),
    ("sources_encoded", "Encoder prompts encoded, of an encoder-decoder model.", lambda own: own.sources_encoded),
    ("recoveries", "Failed steps after which the KV cache was lost.", lambda own: own.recoveries),
    ("programs_compiled", "Programs compiled ahead of time.", lambda own: own.programs_compiled),
    (
        "programs_failed",
        "Failed compilations in the background, up to two per program.",
        lambda own: own.programs_failed,
    ),
    ("compile_seconds", "Seconds spent compiling, summed over threads.", lambda own: own.compile_seconds),
    ("compilations_after_ready", "Compilations that a request waited for.", lambda own: own.compilations_after_ready),
)
GAUGES: tuple[tuple[str, str, Callable[[Load], float]], ...] = (
    ("num_requests_running", "Running requests.", lambda load: load.running),
    ("num_requests_waiting", "Waiting requests.", lambda load: load.waiting),
    (
        "kv_cache_usage_perc",
        "KV blocks in use; 1 means all.",
        lambda load: load.kv_blocks_used / max(load.kv_blocks_total, 1),
    ),
)
_DEVICE_BYTES = MappingProxyType({"bytes_in_use": "in_use", "peak_bytes_in_use": "peak", "bytes_limit": "limit"})


class Histogram:
    """A Prometheus histogram with upper `bounds` of its buckets."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += count
        self._sum += value * count

    def buckets(self, highest: float = math.inf) -> tuple[list[tuple[str, float]], float]:
        """Return cumulative counts up to `highest`, and the values' sum."""
        totals = list(accumulate(self._counts))
        shown = [
            (str(float(bound)), total) for bound, total in zip(self.bounds, totals, strict=False) if bound <= highest
        ]
        return [*shown, ("+Inf", totals[-1])], self._sum


class FinishedRequests(Protocol):
    """An adapter's finished requests."""

    @property
    def name(self) -> str: ...

    @property
    def num_finished(self) -> int: ...


class FinishedByAdapter(Protocol):
    """All adapters' finished requests."""

    @property
    def num_finished_others(self) -> int: ...

    def __iter__(self) -> Iterator[FinishedRequests]: ...


class PrometheusObserver(Collector):
    """An `Observer` of one engine and a Prometheus collector."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, engine: EngineView, model_name: str, adapters: FinishedByAdapter, number: int = 0) -> None:
        """`number` is the engine's index in a fleet."""
        self._engine = engine
        self.adapters = adapters
        self._labels = {"model_name": model_name, "engine": str(number)}
        self._histograms = {name: Histogram(bounds) for name, _, bounds in HISTOGRAMS}
        self._handled: dict[tuple[str, str, str], int] = {}
        self._handling: dict[tuple[str, str], Histogram] = {}
        self.held_bytes: Callable[[], Mapping[str, int]] = dict
        self._process = psutil.Process()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def step(self, report: StepReport) -> None:
        histograms = self._histograms
        histograms["step_seconds"].observe(report.seconds)
        histograms["iteration_tokens_total"].observe(report.num_tokens)
        histograms["batch_occupancy"].observe(report.num_rows / max(self._engine.get_load().max_running, 1))

    def tokens(self, seconds: float, count: int, is_first: bool) -> None:
        """Observe the latency of new tokens, which those that arrive together share equally."""
        if is_first:
            self._histograms["time_to_first_token_seconds"].observe(seconds)
        else:
            self._histograms["inter_token_latency_seconds"].observe(seconds / count, count)

    def finished(self, output: RequestOutput, params: SamplingParams) -> None:
        """Observe a finished request.

        Prompt tokens count once per request, in vLLM once per output.
        """
        histograms = self._histograms
        lengths = [len(completion.token_ids) for completion in output.outputs]
        histograms["request_prompt_tokens"].observe(len(output.prompt_token_ids))
        if output.num_cached_tokens is not None:
            histograms["request_prefill_kv_computed_tokens"].observe(
                len(output.prompt_token_ids) - output.num_cached_tokens
            )
        for length in lengths:
            histograms["request_generation_tokens"].observe(length)
        histograms["request_max_num_generation_tokens"].observe(max(lengths, default=0))
        histograms["request_params_n"].observe(params.n)
        if params.max_tokens is not None:
            histograms["request_params_max_tokens"].observe(params.max_tokens)
        times = output.metrics
        if times is None:
            return
        histograms["request_num_preemptions"].observe(times.num_preemptions)
        intervals = (
            ("e2e_request_latency_seconds", times.arrival_time, times.finished_time),
            ("request_queue_time_seconds", times.arrival_time, times.first_scheduled_time),
            ("request_inference_time_seconds", times.first_scheduled_time, times.finished_time),
            ("request_prefill_time_seconds", times.first_scheduled_time, times.first_token_time),
            ("request_decode_time_seconds", times.first_token_time, times.finished_time),
        )
        for name, start, end in intervals:
            if start is not None and end is not None:
                histograms[name].observe(end - start)
        if times.first_token_time is not None and times.finished_time is not None and max(lengths, default=0) > 1:
            mean = (times.finished_time - times.first_token_time) / (max(lengths) - 1)
            histograms["request_time_per_output_token_seconds"].observe(mean)

    def request_handled(self, protocol: str, route: str, code: int | str, seconds: float) -> None:
        """Record an answered call.

        `protocol` is "http" or "grpc"; `route` a template such as `/v1/completions`, or `package.Service/Method`;
        `code` an HTTP status or gRPC code. Unknown ones become "other".
        """
        known_routes, known_codes = _ROUTES[protocol], _CODES[protocol]
        route = route if protocol == "http" else route.removeprefix("/")
        route = route if route in known_routes else OTHER
        code = str(code) if str(code) in known_codes else OTHER
        self._handled[protocol, route, code] = self._handled.get((protocol, route, code), 0) + 1
        self._handling.setdefault((protocol, route), Histogram(_HANDLING)).observe(seconds)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._engine_families()
        yield from self._histogram_families()
        yield from self._device_families()
        yield from self._handled_families()

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the engine may not be loaded."""
        return ()

    def _engine_families(self) -> Iterator[Metric]:
        metrics, load = self._engine.metrics, self._engine.get_load()
        for name, documentation, read in COUNTERS:
            yield self._counter(name, documentation, [({}, read(metrics))])
        for name, documentation, read in GAUGES:
            yield self._gauge(name, documentation, [({}, read(load))])
        waiting = [({"reason": "capacity"}, load.waiting - load.deferred), ({"reason": "deferred"}, load.deferred)]
        text = "Waiting requests by reason: capacity, or deferred (only their LoRA adapter has no room yet)."
        yield self._gauge("num_requests_waiting_by_reason", text, waiting)
        reasons = [({"finished_reason": reason}, metrics.finished.get(reason, 0)) for reason in get_args(FinishReason)]
        yield self._counter("request_success", "Finished outputs by reason.", reasons)
        if self._engine.config.speculative_config is not None:
            yield from self._draft_families(metrics)
        if self._engine.config.enable_lora:
            yield from self._adapter_families(load)
        states = [({"state": state}, float(state == self._engine.state)) for state in get_args(EngineState)]
        yield self._gauge("engine_state", "State of the engine: 1 for the current one.", states)
        config = self._engine.config
        facts = {
            "block_size": config.block_size,
            "cache_dtype": config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
            "num_gpu_blocks": load.kv_blocks_total,
            "num_gpu_blocks_override": config.num_kv_blocks,
        }
        labels = {name: str(value) for name, value in facts.items()}
        yield self._gauge(
            "cache_config_info", "Configuration of the KV cache in labels; the value is 1.", [(labels, 1.0)]
        )

    def _draft_families(self, metrics: Metrics) -> Iterator[Metric]:
        for name, documentation, count in (
            ("num_drafts", "Verified drafts: one per output and step.", metrics.drafting_rows),
            ("num_draft_tokens", "Verified draft tokens.", metrics.draft_tokens),
            ("num_accepted_tokens", "Accepted draft tokens.", sum(metrics.accepted_tokens)),
        ):
            yield self._counter(f"spec_decode_{name}", documentation, [({}, count)])
        places = [({"position": str(place)}, count) for place, count in enumerate(metrics.accepted_tokens)]
        text = "Accepted draft tokens by position in the draft."
        yield self._counter("spec_decode_num_accepted_tokens_per_pos", text, places)

    def _adapter_families(self, load: Load) -> Iterator[Metric]:
        """Yield the adapters in use, as labels of one sample, and finished requests by adapter.

        Routers read the newest sample: its value is the time.
        """
        labels = {
            "max_lora": str(self._engine.config.max_loras),
            "running_lora_adapters": ",".join(load.running_adapters),
            "waiting_lora_adapters": ",".join(load.waiting_adapters),
        }
        text = "LoRA adapters of running and waiting requests in labels; the value is the current time."
        yield self._gauge("lora_requests_info", text, [(labels, time.time())])
        counts = {served.name: served.num_finished for served in self.adapters}
        counts[OTHER] = counts.get(OTHER, 0) + self.adapters.num_finished_others
        samples = [({"lora_name": name}, count) for name, count in counts.items()]
        text = "Finished requests by LoRA adapter; other: adapters that are no longer loaded."
        yield self._counter("lora_requests_finished", text, samples)

    def _histogram_families(self) -> Iterator[Metric]:
        try:
            longest = self._engine.model.max_model_len
        except EngineError:
            return
        for name, documentation, bounds in HISTOGRAMS:
            family = HistogramMetricFamily(f"jaxllm:{name}", documentation, labels=list(self._labels))
            buckets, total = self._histograms[name].buckets(longest if bounds is _TOKENS else math.inf)
            family.add_metric(list(self._labels.values()), buckets, total)
            yield family

    def _device_families(self) -> Iterator[Metric]:
        """Yield metrics of programs and device memory; nothing during loading, when querying JAX would block."""
        report = self._engine.device_report()
        if report is None:
            return
        yield self._gauge("programs_ready", "Compiled programs.", [({}, report.programs_ready)])
        compiling = report.programs_compiling
        yield self._gauge("programs_compiling", "Threads that compile in the background.", [({}, compiling)])
        yield self._gauge(
            "programs_possible", "Programs that this configuration can use.", [({}, report.programs_possible)]
        )
        memory: list[tuple[Mapping[str, str], float]] = []
        for device, stats in report.memory.items():
            kinds = [(kind, stats[name]) for name, kind in _DEVICE_BYTES.items() if name in stats]
            memory += [({"device": device, "kind": kind}, float(value)) for kind, value in kinds]
        if not memory:
            memory = [({"device": "cpu", "kind": "in_use"}, float(self._process.memory_info().rss))]
        yield self._gauge("device_memory_bytes", "Bytes of a device's memory; on a CPU, of this process.", memory)

    def _handled_families(self) -> Iterator[Metric]:
        held = GaugeMetricFamily("jaxllm:held_bytes", "Bytes held for requests, by kind.", labels=["account"])
        for account, num_bytes in self.held_bytes().items():
            held.add_metric([account], num_bytes)
        yield held
        names = ["protocol", "route", "code"]
        counts = CounterMetricFamily("jaxllm:requests_handled", "Calls answered by the front ends.", labels=names)
        for labels, count in self._handled.items():
            counts.add_metric(list(labels), count)
        yield counts
        seconds = HistogramMetricFamily(
            "jaxllm:request_handling_seconds", "Seconds of a call, until the end of a stream.", labels=names[:2]
        )
        for labels, histogram in self._handling.items():
            seconds.add_metric(list(labels), *histogram.buckets())
        yield seconds

    def _counter(self, name: str, documentation: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> Metric:
        return self._family(CounterMetricFamily, name, documentation, samples)

    def _gauge(self, name: str, documentation: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> Metric:
        return self._family(GaugeMetricFamily, name, documentation, samples)

    def _family(
        self, kind: Any, name: str, documentation: str, samples: Sequence[tuple[Mapping[str, str], float]]
    ) -> Metric:
        family = kind(f"jaxllm:{name}", documentation, labels=[*self._labels, *(samples[0][0] if samples else ())])
        for labels, value in samples:
            family.add_metric([*self._labels.values(), *labels.values()], value)
        return family
