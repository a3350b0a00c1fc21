"""docs/telemetry.md and README.md name what spans really have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from extproc.core.decision import Reason
from extproc.core.replica import EngineLoad, Replica
from extproc.core.request import Request
from extproc.core.router import Router
from extproc.picker import EndpointPicker, ResponseStart
from extproc.telemetry import DecisionSpans

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parent.parent
ATTRIBUTE = re.compile(r"^\| `([a-z_.]+)` \| (\S+) \|.* \| (.+) \|$", re.M)
REASON = re.compile(r"^\| `(\w+)` \| [^|]+ \|$", re.M)

CHAT = Request(
    "POST",
    "/v1/chat/completions",
    {"x-session-id": "s"},
    b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}',
)
START = ResponseStart(500, True, prompt_tokens=7, cached_tokens=0, queue_depth=0, served_endpoint="10.0.0.1:8000")


def _documented() -> dict[str, tuple[str, str]]:
    """attribute -> (type, when)"""
    page = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")
    return {name: (kind, when) for name, kind, when in ATTRIBUTE.findall(page)}


def _span(request: Request, replicas: Sequence[Replica], start: ResponseStart | None) -> ReadableSpan:
    """The span that a request leaves."""
    exporter, provider, router = InMemorySpanExporter(), TracerProvider(), Router()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    router.set_members(replicas, 0.0)
    for replica in replicas:
        router.set_load(replica.id, EngineLoad(running=0, waiting=0), 0.0)
    pick = EndpointPicker(router, observer=DecisionSpans(provider, router.settings.policy)).pick(request, None)
    if start is not None:
        pick.response_started(start)
    pick.finish()
    (span,) = exporter.get_finished_spans()
    return span


def _type(value: object) -> str:
    # bool before int, which it is a kind of.
    types = ((tuple, "string[]"), (str, "string"), (bool, "bool"), (int, "int"), (float, "double"))
    return next(name for kind, name in types if isinstance(value, kind))


def test_a_span_has_what_the_page_says() -> None:
    span = _span(CHAT, [Replica("a", "10.0.0.1:8000", frozenset({"m"}))], START)
    assert span.attributes is not None
    assert {name: _type(value) for name, value in span.attributes.items()} == {
        name: kind for name, (kind, _) in _documented().items()
    }


def test_a_refused_request_has_what_is_always_there() -> None:
    span = _span(Request("GET", "/v1/models", {}, b""), [], None)
    assert span.attributes is not None
    always = {name for name, (_, when) in _documented().items() if when == "always"}
    assert set(span.attributes) == always | {"error.type"}


@pytest.mark.parametrize("page", ["docs/telemetry.md", "README.md"])
def test_every_reason_is_explained(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert set(REASON.findall(text)) >= set(Reason)
