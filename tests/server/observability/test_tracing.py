"""Spans as received by OpenTelemetry's in-memory exporter."""

from __future__ import annotations

import asyncio
import builtins
import contextvars
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from jaxllm.errors import UserError
from jaxllm.outputs import RequestMetrics
from jaxllm.sampling_params import SamplingParams
from jaxllm_server.observability import tracing
from jaxllm_server.observability.tracing import NO_SPAN, Tracer, current_span, request_attributes

_TRACE, _PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"  # the W3C's example


class _Traced:
    """A tracer and its exported spans."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer = tracing.tracer_to(self.exporter)

    def spans(self) -> Any:
        self.tracer.provider.force_flush()  # pyright: ignore[reportAttributeAccessIssue]
        return self.exporter.get_finished_spans()


@pytest.fixture
def traced() -> Iterator[_Traced]:
    own = _Traced()
    yield own
    own.tracer.close()


async def test_a_request_becomes_one_span_with_the_names_of_vllm(traced: _Traced) -> None:
    async def generate() -> None:
        params = SamplingParams(n=2, temperature=0.5, top_p=0.9, max_tokens=None)
        times = RequestMetrics(10.0, 10.5, 11.5, 14.0)
        current_span().set(request_attributes("r1", "tiny", params, times, 7, 40), name=tracing.REQUEST_SPAN)

    span = traced.tracer.start(f"00-{_TRACE}-{_PARENT}-01", "jaxllm.v1.X/Generate", {"rpc.system": "grpc"})
    await generate()
    span.end()
    span.end(ValueError("only the first end counts"))
    span.set({"late": 1})
    (span,) = traced.spans()
    assert span.name == "llm_request"
    assert format(span.context.trace_id, "032x") == _TRACE
    assert format(span.parent.span_id, "016x") == _PARENT
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes) == {
        **{"rpc.system": "grpc", "gen_ai.response.model": "tiny", "gen_ai.request.id": "r1"},
        **{"gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9, "gen_ai.request.n": 2},
        **{"gen_ai.usage.num_sequences": 2, "gen_ai.usage.prompt_tokens": 7, "gen_ai.usage.completion_tokens": 40},
        **{"gen_ai.latency.time_in_queue": 0.5, "gen_ai.latency.time_to_first_token": 1.5, "gen_ai.latency.e2e": 4.0},
        **{"gen_ai.latency.time_in_model_prefill": 1.0, "gen_ai.latency.time_in_model_decode": 2.5},
        "gen_ai.latency.time_in_model_inference": 3.5,
    }
    assert span.resource.attributes["service.name"] == "jaxllm"


async def test_concurrent_calls_have_their_own_spans(traced: _Traced) -> None:
    async def answer(number: int) -> None:
        span = traced.tracer.start(None, "call", {"number": number})
        await asyncio.sleep(0.001 * (number % 3))
        current_span().set({"again": number})
        span.end()

    await asyncio.gather(*(answer(number) for number in range(20)))
    assert current_span() is NO_SPAN
    spans = traced.spans()
    assert sorted(span.attributes["number"] for span in spans) == list(range(20))
    assert all(span.attributes["again"] == span.attributes["number"] for span in spans)
    assert len({span.context.trace_id for span in spans}) == 20


def test_an_error_is_the_status_and_a_cancelled_call_is_none(traced: _Traced) -> None:
    traced.tracer.start(None, "failed", {}).end(UserError("top_p is wrong" + "x" * 1000, "top_p"))
    traced.tracer.start(None, "cancelled", {}).end(asyncio.CancelledError())
    failed, cancelled = traced.spans()
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description.startswith("top_p is wrong") and len(failed.status.description) == 256
    assert failed.attributes["error.type"] == "UserError"
    assert cancelled.status.status_code is StatusCode.UNSET
    assert cancelled.attributes["error.type"] == "CancelledError"


@pytest.mark.parametrize(
    "garbage",
    [
        *("", "-", "00", f"00-{_TRACE}-{_PARENT}", f"00-{_TRACE.upper()}-{_PARENT}-01", f"ff-{_TRACE}-{_PARENT}-01"),
        *(f"00-{'0' * 32}-{_PARENT}-01", f"00-{_TRACE}-{'0' * 16}-01", f"00-{_TRACE}-{_PARENT}-01-more"),
        *(f"00-{_TRACE[:-1]}é-{_PARENT}-01", f"00-{_TRACE}-{_PARENT}-01\r\nx: y", "٠٠-" + "a" * 50),
        *("\x00" * 55, "-" * 1_000_000),
    ],
)
def test_a_traceparent_that_is_none_begins_a_new_trace(traced: _Traced, garbage: str) -> None:
    traced.tracer.start(garbage, "call", {}).end()
    (span,) = traced.spans()
    assert span.parent is None and format(span.context.trace_id, "032x") != _TRACE


def test_random_traceparents_never_raise(traced: _Traced) -> None:
    rng = random.Random(0)
    for _ in range(2000):
        text = list(f"00-{_TRACE}-{_PARENT}-01")
        for _ in range(rng.randrange(4)):
            text[rng.randrange(len(text))] = chr(rng.choice([0, 10, 45, 48, 71, 97, 255, 0x660, 0x1F600]))
        traced.tracer.start("".join(text[: rng.randrange(60)]), "call", {}).end()


def test_a_trace_that_the_client_does_not_sample_is_not_sent(traced: _Traced) -> None:
    traced.tracer.start(f"00-{_TRACE}-{_PARENT}-00", "call", {}).end(ValueError("x"))
    assert traced.spans() == ()


def test_closing_sends_what_is_left_and_does_not_wait_for_a_collector_that_hangs(
    traced: _Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced.tracer.start(None, "last", {}).end()
    traced.tracer.close()
    assert [span.name for span in traced.exporter.get_finished_spans()] == ["last"]

    class Hanging(InMemorySpanExporter):
        gone = threading.Event()

        def export(self, spans: Any) -> Any:
            self.gone.wait(20.0)
            return super().export(spans)

    monkeypatch.setattr(tracing, "FAREWELL_SECONDS", 0.1)
    tracer = tracing.tracer_to(Hanging())
    tracer.start(None, "last", {}).end()
    begin = time.monotonic()
    tracer.close()
    assert time.monotonic() - begin < 2.0
    Hanging.gone.set()


def test_without_an_endpoint_nothing_is_imported_and_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "__import__", _without_opentelemetry)

    def answer() -> None:
        tracer = Tracer.from_endpoint(None)
        span = tracer.start(f"00-{_TRACE}-{_PARENT}-01", "call", {"a": 1})
        span.set({"b": 2}, name="c")
        span.end(ValueError("x"))
        tracer.close()
        assert span is NO_SPAN and current_span() is NO_SPAN

    contextvars.Context().run(answer)  # isolated from spans of other tests


def test_an_endpoint_without_the_packages_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "__import__", _without_opentelemetry)
    with pytest.raises(UserError, match=r"pip install 'jaxllm\[otel\]'") as caught:
        Tracer.from_endpoint("http://localhost:4318")
    assert caught.value.parameter == "otlp_traces_endpoint"


@pytest.mark.parametrize("endpoint", ["", "localhost:4318", "grpc://localhost:4317", "http://", "file:///etc/passwd"])
def test_an_endpoint_that_is_no_url_of_http_is_refused(endpoint: str) -> None:
    with pytest.raises(UserError, match="otlp_traces_endpoint must be a URL"):
        Tracer.from_endpoint(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://localhost:4318/own/path", "http://localhost:4318/own/path"),
    ],
)
def test_the_path_of_an_endpoint_is_that_of_otlp_unless_it_has_one(endpoint: str, url: str) -> None:
    exporter = tracing.exporter_to(endpoint)
    assert exporter._endpoint == url  # pyright: ignore[reportAttributeAccessIssue]


_import = builtins.__import__


def _without_opentelemetry(name: str, *arguments: Any, **more: Any) -> Any:
    if name.startswith("opentelemetry"):
        raise ImportError(f"No module named {name!r}")
    return _import(name, *arguments, **more)
