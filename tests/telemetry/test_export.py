"""Where spans go: the console, a collector, one that is dead; and what the standard variables change."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from demo.ports import free_port
from extproc.core.replica import Replica
from extproc.core.request import Request
from extproc.core.router import Router
from extproc.picker import EndpointPicker
from extproc.telemetry import LAST_SPANS_TIMEOUT_S, DecisionSpans, Exporter, TelemetrySettings, make_provider

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import TracerProvider

UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_TRACES_SAMPLER", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)


def provider_of(settings: TelemetrySettings) -> TracerProvider:
    provider = make_provider(settings)
    assert provider is not None
    return provider


def route(provider: TracerProvider, count: int = 1, sample_ratio: float = 1.0, **headers: str) -> None:
    """Make and end so many decisions."""
    router = Router()
    router.set_members([Replica("a", "10.0.0.1:8000")], 0.0)
    picker = EndpointPicker(router, observer=DecisionSpans(provider, "expected_work", sample_ratio))
    for _ in range(count):
        picker.pick(Request("GET", "/v1/models", headers), None).finish()


def test_no_exporter_is_no_provider() -> None:
    assert make_provider(TelemetrySettings()) is None


def test_the_console_has_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    provider = provider_of(TelemetrySettings(Exporter.CONSOLE, service_name="front"))
    route(provider, 3)
    provider.shutdown()
    lines = capsys.readouterr().out.splitlines()
    spans = [json.loads(line) for line in lines]
    assert [span["name"] for span in spans] == ["route"] * 3
    assert {span["resource"]["attributes"]["service.name"] for span in spans} == {"front"}
    assert {span["attributes"]["routing.replica.id"] for span in spans} == {"a"}


def test_a_share_of_the_requests_is_sampled(capsys: pytest.CaptureFixture[str]) -> None:
    provider = provider_of(TelemetrySettings(Exporter.CONSOLE, sample_ratio=0.1))
    route(provider, 1000, sample_ratio=0.1)
    provider.shutdown()
    # 1,000 draws at 0.1: 6 standard deviations are 57.
    assert 43 <= len(capsys.readouterr().out.splitlines()) <= 157


def test_standard_variables_win(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "named")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    provider = provider_of(TelemetrySettings(Exporter.CONSOLE, sample_ratio=0.0))
    assert provider.sampler is ALWAYS_ON
    route(provider, sample_ratio=0.0, traceparent=UNSAMPLED)  # this sampler does not follow the parent
    provider.shutdown()
    (span,) = map(json.loads, capsys.readouterr().out.splitlines())
    resource = span["resource"]["attributes"]
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("named", "test")


def test_what_a_client_writes_is_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    provider = provider_of(TelemetrySettings(Exporter.CONSOLE))
    router = Router()
    router.set_members([Replica("a", "10.0.0.1:8000")], 0.0)
    picker = EndpointPicker(router, observer=DecisionSpans(provider, "expected_work"))
    body = json.dumps({"model": "m" * 100_000, "messages": [{"role": "user", "content": "hi"}]}).encode()
    picker.pick(Request("M" * 100_000, "/p" * 50_000, {}, b""), None).finish()
    picker.pick(Request("POST", "/v1/chat/completions", {}, body), None).finish()
    provider.shutdown()
    odd, chat = (json.loads(line)["attributes"] for line in capsys.readouterr().out.splitlines())
    assert len(odd["http.request.method"]) == len(odd["url.path"]) == len(chat["gen_ai.request.model"]) == 256


@pytest.fixture(params=["refuses", "never answers"])
def dead_collector(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with socket.socket() as listener:
        port = free_port()
        if request.param == "never answers":
            listener.bind(("127.0.0.1", port))
            listener.listen()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        yield


@pytest.mark.usefixtures("dead_collector")
def test_a_dead_collector_costs_spans_but_no_request_and_no_patience() -> None:
    provider = provider_of(TelemetrySettings(Exporter.OTLP))
    began_s = time.monotonic()
    route(provider, 5000)  # more than the processor's queue holds
    decided_s = time.monotonic() - began_s
    began_s = time.monotonic()
    provider.shutdown()
    left_s = time.monotonic() - began_s
    # The exporter's own patience is 10 s for an answer, and 30 s for a collector to come back.
    assert decided_s < 5
    assert left_s < LAST_SPANS_TIMEOUT_S + 1
