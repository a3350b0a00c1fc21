"""Spans as they leave, of decisions that are really made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

from extproc.core.replica import Replica
from extproc.core.router import Router, RouterSettings
from extproc.picker import EndpointPicker
from extproc.telemetry import DecisionSpans

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.util.types import AttributeValue

    from extproc.core.request import Request
    from extproc.picker import Pick, ResponseStart


@dataclass
class Traced:
    """A picker whose spans are kept; its clock stands still unless the test moves it."""

    settings: RouterSettings = field(default_factory=RouterSettings)
    sample_ratio: float = 1.0
    now_s: float = 100.0

    def __post_init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBased(ALWAYS_ON))
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.router = Router(self.settings)
        self.observer = DecisionSpans(provider, self.settings.policy.value, self.sample_ratio)
        self.picker = EndpointPicker(self.router, observer=self.observer, clock=lambda: self.now_s)

    def fleet(self, *replicas: Replica) -> None:
        self.router.set_members(replicas, self.now_s)

    def pick(self, request: Request) -> Pick:
        return self.picker.pick(request, None)

    def route(self, request: Request, start: ResponseStart | None = None) -> ReadableSpan:
        """The span of a request that is decided, answered where there is a start, and ended."""
        pick = self.pick(request)
        if start is not None:
            pick.response_started(start)
        pick.finish()
        return self.spans[-1]

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()


@pytest.fixture
def traced() -> Traced:
    traced = Traced()
    traced.fleet(Replica("a", "10.0.0.1:8000"))
    return traced


def attributes(span: ReadableSpan) -> Mapping[str, AttributeValue]:
    assert span.attributes is not None
    return span.attributes
