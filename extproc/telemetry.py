"""One OpenTelemetry span per decision, from the decision to the end of its stream.

Child of the trace that the client or Envoy began (W3C context in the request's headers). Attributes follow the
semantic conventions where they have a name for it, and are `routing.*` otherwise (docs/telemetry.md). Neither a
session id nor a prompt is in them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from random import random
from typing import TYPE_CHECKING, Final

from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind, Status, StatusCode, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from extproc.address import split_address

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from extproc.core.decision import Decision
    from extproc.core.features import Features
    from extproc.core.request import Request
    from extproc.picker import ResponseStart

SPAN_NAME: Final = "route"
CONSOLE_DELAY_MS: Final = 200
"""A console is for people, and the batch processor's own 5 s look like nothing happens."""
LAST_SPANS_TIMEOUT_S: Final = 2.0
"""The SDK would wait 30 s for a collector, which is what Kubernetes gives a whole pod to end."""
MAX_ATTRIBUTE_CHARACTERS: Final = 256
"""Method, path and model are what a client wrote: no span grows with them."""
MAX_CANDIDATES: Final = 16
"""More than a policy weighs by itself; of replicas that the data plane has preselected it weighs all."""
SAMPLER_VARIABLE: Final = "OTEL_TRACES_SAMPLER"
UNSAMPLED: Final = "-00"
"""How a `traceparent` ends whose trace nobody keeps (W3C Trace Context, 3.2.2.5)."""


class Exporter(StrEnum):
    """Where spans go."""

    NONE = "none"
    CONSOLE = "console"
    OTLP = "otlp"


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """Spans, and metrics where they are pushed.

    exporter: "none", "console" (one JSON object per line on stdout) or "otlp" (JSON over HTTP, to
        http://localhost:4318 or where the standard OTEL_EXPORTER_OTLP_* variables say).
    sample_ratio: of the requests that come without a trace of their own; OTEL_TRACES_SAMPLER overrides it. A request
        that has one is sampled as its trace is.
    push_metrics: send the metrics page to the same collector as well, every OTEL_METRIC_EXPORT_INTERVAL ms.
    service_name: OTEL_SERVICE_NAME overrides it.
    """

    exporter: Exporter = Exporter.NONE
    sample_ratio: float = 1.0
    push_metrics: bool = False
    service_name: str = "extproc"

    def __post_init__(self) -> None:
        if not 0 <= self.sample_ratio <= 1:
            raise ValueError("sample_ratio must be from 0 to 1")


class BatchProcessor(BatchSpanProcessor):
    """Exports from a thread of its own, and at the end does not wait long for a collector that may be dead."""

    def shutdown(self) -> None:
        # In a thread, since an export that has begun waits for its answer whatever it is told meanwhile.
        ending = threading.Thread(target=super().shutdown, daemon=True)
        ending.start()
        ending.join(LAST_SPANS_TIMEOUT_S)
        if ending.is_alive():
            self.span_exporter.shutdown()  # what is left is given up


def make_resource(settings: TelemetrySettings) -> Resource:
    """Who says it."""
    return Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", settings.service_name)})


def make_provider(settings: TelemetrySettings) -> TracerProvider | None:
    """None where no spans are wanted. Export runs in a thread of its own and drops what it can't deliver."""
    exporter: SpanExporter
    match settings.exporter:
        case Exporter.NONE:
            return None
        case Exporter.CONSOLE:
            exporter = ConsoleSpanExporter(out=sys.stdout, formatter=lambda span: span.to_json(indent=None) + "\n")
            processor = BatchProcessor(exporter, schedule_delay_millis=CONSOLE_DELAY_MS)
        case Exporter.OTLP:
            processor = BatchProcessor(OTLPSpanExporter())
    sampler = None if SAMPLER_VARIABLE in os.environ else ParentBased(ALWAYS_ON)  # DecisionSpans draws lots itself
    limits = SpanLimits(max_span_attribute_length=MAX_ATTRIBUTE_CHARACTERS)
    provider = TracerProvider(sampler, make_resource(settings), span_limits=limits)
    provider.add_span_processor(processor)
    return provider


class DecisionSpans:
    """A DecisionObserver that writes spans.

    sample_ratio: of the requests without a trace. Lots are drawn before a span is begun: the SDK makes one first and
        lets a sampler look at it, which costs as much as the decision.
    """

    def __init__(self, provider: TracerProvider, policy: str, sample_ratio: float = 1.0) -> None:
        self.policy = policy
        self._sample_ratio = 1.0 if SAMPLER_VARIABLE in os.environ else sample_ratio
        self._tracer = provider.get_tracer("extproc")
        self._follows_parent = isinstance(provider.sampler, ParentBased)
        self._propagator = TraceContextTextMapPropagator()
        self._open: dict[int, tuple[Span, int]] = {}  # with the cached tokens that are expected

    def decided(self, request: Request, features: Features, decision: Decision, took_s: float) -> None:
        parent = request.headers.get("traceparent")
        context = None
        if parent is not None:
            if self._follows_parent and parent.endswith(UNSAMPLED):
                return
            context = self._propagator.extract(request.headers)
            if not get_current_span(context).get_span_context().is_valid:
                parent = None  # nonsense; the client has no say in what is sampled
        if parent is None and random() >= self._sample_ratio:
            return
        began_ns = time.time_ns() - round(took_s * 1e9)
        span = self._tracer.start_span(SPAN_NAME, context, SpanKind.SERVER, start_time=began_ns)
        if not span.is_recording():
            return
        expected = _expected_cached_tokens(features, decision)
        self._open[id(decision)] = span, expected  # the pick keeps the decision, hence its id, until `finished`
        span.set_attributes(
            {
                "http.request.method": request.method,
                "url.path": request.path.partition("?")[0],
                "gen_ai.operation.name": features.api.value,
                "routing.policy": self.policy,
                "routing.reason": decision.reason.value,
                "routing.membership_version": decision.membership_version,
                "routing.stale": decision.stale,
                "routing.decision_s": took_s,
                "routing.prompt_tokens": decision.prompt_tokens,
                "routing.matched_bytes": decision.matched_bytes,
                "routing.expected_cached_tokens": expected,
                "routing.truncated": features.truncated,
                "routing.by_headers": features.by_headers,
                "routing.candidates": [
                    f"{c.replica_id} work={c.work_tokens:.0f} uncached={c.uncached_tokens} in_flight={c.in_flight}"
                    for c in islice(decision.candidates, MAX_CANDIDATES)
                ],
            }
        )
        if features.model is not None:
            span.set_attribute("gen_ai.request.model", features.model)
        if features.conversation_source is not None:
            span.set_attribute("routing.conversation_source", features.conversation_source)
        if decision.primary is not None:
            span.set_attribute("routing.primary", decision.primary)
        if decision.endpoint is not None and decision.replica_id is not None:
            host, port = split_address(decision.endpoint)
            span.set_attribute("server.address", host)
            span.set_attribute("server.port", port)
            span.set_attribute("routing.replica.id", decision.replica_id)
        else:
            span.set_attribute("error.type", decision.reason.value)
            span.set_status(Status(StatusCode.ERROR, decision.reason.value))
        if decision.lease is not None:
            load, at_s = decision.lease.load, decision.lease.decided_s
            span.set_attribute("routing.in_flight", load.in_flight)
            span.set_attribute("routing.work_tokens", load.work_tokens())
            if load.engine is not None:
                span.set_attribute("routing.load_age_s", at_s - load.engine_s)

    def response_started(self, decision: Decision, start: ResponseStart, since_decision_s: float) -> None:
        if id(decision) not in self._open:
            return
        span, expected = self._open[id(decision)]
        span.set_attribute("http.response.status_code", start.status)
        if start.status >= 500:
            span.set_attribute("error.type", str(start.status))
            span.set_status(StatusCode.ERROR)
        span.set_attribute("routing.response_started_s", since_decision_s)
        if start.prompt_tokens is not None:
            span.set_attribute("gen_ai.usage.input_tokens", start.prompt_tokens)
        if start.cached_tokens is not None:
            span.set_attribute("routing.cached_tokens", start.cached_tokens)
            span.set_attribute("routing.prediction_error_tokens", start.cached_tokens - expected)
        if start.served_endpoint is not None:
            span.set_attribute("routing.served_endpoint", start.served_endpoint)

    def finished(self, decision: Decision, since_decision_s: float) -> None:
        if id(decision) in self._open:
            span, _ = self._open.pop(id(decision))
            span.end()


def _expected_cached_tokens(features: Features, decision: Decision) -> int:
    """What `matched_bytes` are in tokens, at the prompt's own estimate."""
    return (
        round(decision.prompt_tokens * decision.matched_bytes / features.prompt_bytes) if features.prompt_bytes else 0
    )
