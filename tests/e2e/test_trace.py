"""One trace through all of it: client, Envoy, decision, engine; and what is not traced."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

import pytest

from demo.stack import Stack
from extproc.core.decision import Reason
from extproc.envoy_config import EnvoySettings
from serve_app.settings import AppSettings
from tests.support.client import ask
from tests.support.collector import Collector, Span
from tests.support.proxied_fleet import proxied_fleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import aiohttp

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CLIENT_SPAN = "00f067aa0ba902b7"
CHAT = b'{"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}'
INGRESS, QUESTION, ATTEMPT, DECISION, ENGINE = (
    "ingress",
    "async envoy.service.ext_proc.v3.ExternalProcessor.Process egress",
    "router fleet egress",
    "route",
    "llm_request",
)


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with Collector() as collector:
        yield collector


def one(spans: list[Span], name: str, parent_id: str) -> Span:
    found = [each for each in spans if (each.name, each.parent_id) == (name, parent_id)]
    assert len(found) == 1, [(each.service, each.name, each.span_id, each.parent_id) for each in spans]
    return found[0]


async def test_client_envoy_decision_and_engine_are_one_trace(
    collector: Collector, tmp_path: Path, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = AppSettings(num_replicas=2, otlp_traces_endpoint=f"{collector.url}/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    stack = Stack(app, tmp_path, {"telemetry": {"exporter": "otlp"}, "envoy": {"otlp": collector.address}})
    await asyncio.to_thread(stack.__enter__)
    try:
        trace_id = secrets.token_hex(16)
        headers = {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01", "x-session-id": "mine"}
        answer = await ask(client, stack.url, CHAT, headers)
        spans = await collector.wait_for(trace_id, INGRESS, QUESTION, ATTEMPT, DECISION, ENGINE)
    finally:
        await asyncio.to_thread(stack.__exit__)

    ingress = one(spans, INGRESS, CLIENT_SPAN)
    decision = one(spans, DECISION, one(spans, QUESTION, ingress.span_id).span_id)
    upstream = one(spans, ATTEMPT, ingress.span_id)
    engine = one(spans, ENGINE, upstream.span_id)
    assert [span.service for span in (ingress, decision, upstream, engine)] == ["envoy", "extproc", "envoy", "engine"]
    assert answer.status == 200
    assert decision.attributes["routing.reason"] == Reason.SESSION
    assert decision.attributes["routing.replica.id"] == answer.replica
    host, port = decision.attributes["server.address"], decision.attributes["server.port"]
    assert upstream.attributes["upstream_address"] == f"{host}:{port}"
    assert decision.attributes["gen_ai.usage.input_tokens"] == engine.attributes["gen_ai.usage.prompt_tokens"]


async def test_what_the_client_says_of_sampling_holds(collector: Collector, tmp_path: Path) -> None:
    """No trace is asked for beyond those that come with one; the flag of those goes all the way."""
    async with proxied_fleet(tmp_path, 2, EnvoySettings(otlp=collector.address), sample_ratio=0.0) as fleet:
        dropped, kept = secrets.token_hex(16), secrets.token_hex(16)
        for trace_id, flag in ((dropped, "00"), (kept, "01"), ("", "00")):
            headers = {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-{flag}"} if trace_id else {}
            answer = await fleet.ask(headers=headers)
            at_replica = fleet.upstream(answer.endpoint).seen[-1].headers["traceparent"]
            at_router = fleet.watch.requests[-1].headers["traceparent"]
            for seen in (at_replica, at_router):
                _, seen_trace, parent_id, seen_flag = seen.split("-")
                assert seen_flag == flag
                assert not trace_id or seen_trace == trace_id
                assert parent_id != CLIENT_SPAN, "not a child of Envoy's span"
        await collector.wait_for(kept, INGRESS)
        assert {span.trace_id for span in collector.spans} == {kept}


async def test_a_share_of_the_other_requests_is_sampled(collector: Collector, tmp_path: Path) -> None:
    async with proxied_fleet(tmp_path, 2, EnvoySettings(otlp=collector.address), sample_ratio=0.5) as fleet:
        for _ in range(200):
            await fleet.ask()
        flags = [request.headers["traceparent"][-2:] for request in fleet.watch.requests]
        # 200 draws at 0.5: 6 standard deviations are 42.
        assert 58 <= flags.count("01") <= 142
        assert flags.count("01") + flags.count("00") == 200


async def test_each_attempt_is_a_span_of_its_own(collector: Collector, tmp_path: Path) -> None:
    async with proxied_fleet(tmp_path, 2, EnvoySettings(otlp=collector.address)) as fleet:
        fleet.upstreams[0].status = 503
        trace_id, chosen = "", ""
        while chosen != fleet.upstreams[0].endpoint:  # the least work, hence one after the other
            trace_id = secrets.token_hex(16)
            answer = await fleet.ask(headers={"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01"})
            assert (answer.status, answer.endpoint) == (200, fleet.upstreams[1].endpoint)
            chosen = str(fleet.watch.decisions[-1].endpoint)

        spans = await collector.wait_for(trace_id, INGRESS, ATTEMPT, ATTEMPT)
        attempts = [span for span in spans if span.name == ATTEMPT]
        ingress = one(spans, INGRESS, CLIENT_SPAN)
        assert {span.parent_id for span in attempts} == {ingress.span_id}
        assert {str(span.attributes["upstream_address"]) for span in attempts} == set(fleet.endpoints)


async def test_a_dead_collector_costs_no_request(tmp_path: Path) -> None:
    dead = Collector()  # nobody listens
    async with proxied_fleet(tmp_path, 2, EnvoySettings(otlp=dead.address)) as fleet:
        answers = await asyncio.gather(*(fleet.ask() for _ in range(100)))
        assert {answer.status for answer in answers} == {200}
        assert len(fleet.watch.decisions) == 100
