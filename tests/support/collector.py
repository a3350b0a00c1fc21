"""A collector of spans: OTLP over HTTP, protobuf from Envoy and JSON from the router and the replicas."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

from demo.ports import free_port
from demo.wait import until

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SCOPE_SPANS = ResourceSpans.DESCRIPTOR.fields_by_number[2].name
"""Renamed once, with the same number: which name it has here depends on the package that was installed last."""


@dataclass(frozen=True)
class Span:
    """service: `service.name` of its resource. Ids in hex; `parent_id` is empty at the root of a trace."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    attributes: Mapping[str, Any]


class Collector:
    """Listens on a port of loopback, in the test's own event loop. An async context manager."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.url = f"http://{self.address}"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        is_json = request.content_type == "application/json"
        self.spans += _read_json(json.loads(body)) if is_json else _read_protobuf(body)
        return web.Response()

    def trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]

    async def wait_for(self, trace_id: str, *names: str, timeout_s: float = 40.0) -> list[Span]:
        """The trace, once it has spans of these names; one that is named twice, twice."""

        async def complete() -> bool:
            return not Counter(names) - Counter(span.name for span in self.trace(trace_id))

        await until(complete, f"spans named {', '.join(names)}", timeout_s)
        return self.trace(trace_id)


def _read_protobuf(body: bytes) -> Iterable[Span]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"]
        for scope in getattr(resource, SCOPE_SPANS):
            for span in scope.spans:
                ids = (each.hex() for each in (span.trace_id, span.span_id, span.parent_span_id))
                attributes = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
                yield Span(service, span.name, *ids, span.kind, attributes)


def _read_json(document: Mapping[str, Any]) -> Iterable[Span]:
    for resource in document["resourceSpans"]:
        service = _attributes(resource["resource"])["service.name"]
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                ids = (span["traceId"], span["spanId"], span.get("parentSpanId", ""))
                yield Span(service, span["name"], *ids, span["kind"], _attributes(span))


def _attributes(of: Mapping[str, Any]) -> dict[str, Any]:
    return {each["key"]: _value(each["value"]) for each in of.get("attributes", ())}


def _value(value: Mapping[str, Any]) -> Any:
    ((kind, content),) = value.items()
    if kind == "intValue":
        return int(content)
    if kind == "arrayValue":
        return tuple(map(_value, content.get("values", ())))
    return content
