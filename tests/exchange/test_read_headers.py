"""Envoy shows only the headers that the router is known to read: those that it reads are among them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from extproc.admin.decisions import RecentDecisions
from extproc.core.settings import FeatureSettings
from extproc.messages import READ_HEADERS, BodyMode, RequestBody, RequestHeaders, ResponseHeaders
from extproc.observers import Observers
from extproc.telemetry import DecisionSpans
from tests.support.bodies import BODIES, PATHS

if TYPE_CHECKING:
    from tests.exchange.conftest import Desk


class Headers(dict[str, str]):
    """Headers that note who is asked for, present or not; to go through all of them asks for none."""

    def __init__(self, *values: Any, **more: str) -> None:
        super().__init__(*values, **more)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)


@pytest.mark.parametrize(("dialect", "fields"), BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("known", [{}, {"x-session-id": "s"}, {"traceparent": f"00-{1:032x}-{1:016x}-01"}])
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_what_is_read_is_shown(
    desk: Desk, dialect: str, fields: dict[str, Any], known: dict[str, str], kind: str
) -> None:
    desk.picker.observer = Observers(DecisionSpans(TracerProvider(), "p"), RecentDecisions(desk.router, 10))
    body = json.dumps(fields).encode()
    asked: set[str] = set()
    for number in range(3):
        length = str(len(body) + number)
        request = Headers({":method": "POST", ":path": PATHS[dialect], "content-length": length, **known})
        answer = Headers({":status": "200", "content-type": kind})
        exchange = desk.exchange()
        exchange.receive(RequestHeaders(request, False, BodyMode.BUFFERED))
        exchange.receive(RequestBody(body, end_of_stream=True))
        exchange.receive(ResponseHeaders(answer))
        exchange.close()
        asked |= request.asked | answer.asked
    shown = {*READ_HEADERS, *FeatureSettings().headers}
    assert asked <= shown
    assert asked >= {":method", ":path", "content-length", "traceparent", ":status", "x-session-id", "x-queue-depth"}
