"""OpenTelemetry spans of requests, as children of the client's `traceparent`.

Attributes have vLLM's names (vllm/tracing.py). The packages, in `jaxllm[otel]`, are imported only if an endpoint is
set.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from jaxllm.errors import UserError
from jaxllm.outputs import RequestMetrics
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

Attribute = str | bool | int | float
REQUEST_SPAN = "llm_request"
_MOST_CHARACTERS = 256  # of an error
FAREWELL_SECONDS = 2.0


class Span:
    """A call's span; this class, without tracing, does nothing."""

    def set(self, attributes: Mapping[str, Attribute | None], name: str | None = None) -> None:
        """Set attributes that are not None; `name` renames the span."""

    def end(self, error: BaseException | None = None) -> None:
        """End the span, as failed for an `error` other than a cancellation. Only the first call counts."""


NO_SPAN = Span()
_current: ContextVar[Span] = ContextVar("jaxllm_span", default=NO_SPAN)


def current_span() -> Span:
    """Return the current call's span, or one that does nothing."""
    return _current.get()


class Tracer:
    """Starts spans; this class, without tracing, does nothing."""

    @staticmethod
    def from_endpoint(endpoint: str | None) -> Tracer:
        """Return a tracer that exports over OTLP/HTTP, such as to http://localhost:4318; None disables tracing.

        OpenTelemetry's environment variables apply.
        """
        if endpoint is None:
            return Tracer()
        return tracer_to(exporter_to(endpoint))

    def start(self, traceparent: str | None, name: str, attributes: Mapping[str, Attribute | None]) -> Span:
        """Start the task's current span, in the client's trace if valid; here one without effect."""
        return NO_SPAN

    def close(self) -> None:
        """Export the remaining spans, within two seconds, and stop; here nothing."""


def request_attributes(
    request_id: str,
    model: str,
    params: SamplingParams,
    times: RequestMetrics | None,
    prompt_tokens: int,
    completion_tokens: int,
) -> dict[str, Attribute | None]:
    attributes: dict[str, Attribute | None] = {
        "gen_ai.response.model": model,
        "gen_ai.request.id": request_id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.num_sequences": params.n,
        "gen_ai.usage.prompt_tokens": prompt_tokens,
        "gen_ai.usage.completion_tokens": completion_tokens,
    }
    if times is not None:
        attributes |= {
            "gen_ai.latency.time_in_queue": _between(times.arrival_time, times.first_scheduled_time),
            "gen_ai.latency.time_to_first_token": _between(times.arrival_time, times.first_token_time),
            "gen_ai.latency.e2e": _between(times.arrival_time, times.finished_time),
            "gen_ai.latency.time_in_model_prefill": _between(times.first_scheduled_time, times.first_token_time),
            "gen_ai.latency.time_in_model_decode": _between(times.first_token_time, times.finished_time),
            "gen_ai.latency.time_in_model_inference": _between(times.first_scheduled_time, times.finished_time),
        }
    return attributes


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


class _RecordedSpan(Span):
    def __init__(self, span: Any) -> None:
        self._span = span

    def set(self, attributes: Mapping[str, Attribute | None], name: str | None = None) -> None:
        if not self._span.is_recording():
            return
        if name is not None:
            self._span.update_name(name)
        self._span.set_attributes({key: value for key, value in attributes.items() if value is not None})

    def end(self, error: BaseException | None = None) -> None:
        from opentelemetry.trace import Status, StatusCode

        if not self._span.is_recording():
            return
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            if not isinstance(error, asyncio.CancelledError):
                self._span.set_status(Status(StatusCode.ERROR, str(error)[:_MOST_CHARACTERS]))
        self._span.end()


class _RecordingTracer(Tracer):
    """A tracer that does not use OpenTelemetry's global provider."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.provider = provider
        self._tracer = provider.get_tracer("jaxllm")
        self._propagator = TraceContextTextMapPropagator()

    def start(self, traceparent: str | None, name: str, attributes: Mapping[str, Attribute | None]) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract({"traceparent": traceparent} if traceparent else {}, Context())
        given = {key: value for key, value in attributes.items() if value is not None}
        span = _RecordedSpan(self._tracer.start_span(name, parent, SpanKind.SERVER, given))
        _current.set(span)
        return span

    def close(self) -> None:
        # OpenTelemetry waits 30 s for an unreachable collector (measured with 1.45).
        closing = threading.Thread(target=self.provider.shutdown, name="jaxllm-tracing-close", daemon=True)
        closing.start()
        closing.join(FAREWELL_SECONDS)


def exporter_to(endpoint: str) -> SpanExporter:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            f"otlp_traces_endpoint must be a URL such as http://localhost:4318/v1/traces, got {endpoint!r}.",
            "otlp_traces_endpoint",
            endpoint,
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise UserError(
            "otlp_traces_endpoint needs OpenTelemetry, which is not installed: pip install 'jaxllm[otel]'.",
            "otlp_traces_endpoint",
            endpoint,
        ) from error
    return OTLPSpanExporter(parts._replace(path="/v1/traces").geturl() if parts.path in ("", "/") else endpoint)


def tracer_to(exporter: SpanExporter) -> Tracer:
    """Export in batches from a thread, dropping spans if its queue is full."""
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource({SERVICE_NAME: "jaxllm"}).merge(OTELResourceDetector().detect())
    # `close` flushes; at exit this could hang.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return _RecordingTracer(provider)
