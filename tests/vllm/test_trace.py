"""Real vLLM in the trace of client, Envoy and decision."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import ExitStack
from typing import TYPE_CHECKING

import aiohttp
import pytest

from demo.stack import Stack
from tests.support.client import Chat
from tests.support.collector import Collector
from tests.vllm.conftest import MODEL, vllm_settings

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

CLIENT_SPAN = "00f067aa0ba902b7"


async def test_vllm_is_a_child_of_envoys_attempt(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        app = vllm_settings(tiny_model, num_replicas=1, otlp_traces_endpoint=f"{collector.url}/v1/traces")
        config = {"telemetry": {"exporter": "otlp"}, "envoy": {"otlp": collector.address}}
        with ExitStack() as cleanup:
            stack = Stack(app, tmp_path, config, deploy_timeout_s=400)
            await asyncio.to_thread(cleanup.enter_context, stack)
            trace_id = secrets.token_hex(16)
            async with aiohttp.ClientSession() as http:
                chat = Chat(http, stack.url, {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01"}, {"model": MODEL})
                answer = await chat.say("hello")
            assert answer.status == 200
            names = ("ingress", "router fleet egress", "route", "llm_request")
            spans = {span.span_id: span for span in await collector.wait_for(trace_id, *names)}
    (engine,) = (span for span in spans.values() if span.name == "llm_request")
    (decision,) = (span for span in spans.values() if span.name == "route")
    attempt = spans[engine.parent_id]
    assert attempt.name == "router fleet egress"
    assert spans[attempt.parent_id].parent_id == CLIENT_SPAN
    assert decision.attributes["routing.replica.id"] == answer.replica
    assert decision.attributes["gen_ai.usage.input_tokens"] == engine.attributes["gen_ai.usage.prompt_tokens"]
