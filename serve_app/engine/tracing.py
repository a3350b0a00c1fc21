"""Spans of the simulated engine: one per generation, named and filled as vLLM's own are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers, MutableHeaders

from serve_app.first_token import CACHED_TOKENS_HEADER, PROMPT_TOKENS_HEADER

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

SPAN_NAME: Final = "llm_request"


def provider(endpoint: str, replica_id: str) -> TracerProvider:
    """Exports to `endpoint` (OTLP in JSON over HTTP, the whole URL) from a thread of its own."""
    made = TracerProvider(resource=Resource.create({"service.instance.id": replica_id}))
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return made


class TracingMiddleware:
    """A span for each POST, child of the trace that its headers name, from its arrival to its last byte."""

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        self._app = app
        self._tracer = provider.get_tracer(__name__)
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        parent = self._propagator.extract(Headers(scope=scope))
        began_s = time.monotonic()
        with self._tracer.start_as_current_span(SPAN_NAME, parent, SpanKind.SERVER) as span:

            async def send_seen(message: Message) -> None:
                if message["type"] == "http.response.start":
                    headers = MutableHeaders(scope=message)
                    span.set_attribute("http.response.status_code", message["status"])
                    if PROMPT_TOKENS_HEADER in headers:
                        span.set_attribute("gen_ai.usage.prompt_tokens", int(headers[PROMPT_TOKENS_HEADER]))
                        span.set_attribute("gen_ai.usage.cached_tokens", int(headers[CACHED_TOKENS_HEADER]))
                        span.set_attribute("gen_ai.latency.time_to_first_token", time.monotonic() - began_s)
                await send(message)

            await self._app(scope, receive, send_seen)
