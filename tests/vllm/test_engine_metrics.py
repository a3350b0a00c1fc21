"""The load figures of real vLLM, read as the service reads them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import aiohttp
import pytest

from demo.wait import until
from extproc.core.replica import EngineLoad, Replica
from extproc.feeds.connection import Connection
from extproc.feeds.engine_metrics import EngineMetrics, LoadSettings, parse
from tests.vllm.conftest import BLOCK_TOKENS, MODEL

if TYPE_CHECKING:
    from serve_app.cluster import RayCluster

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


async def test_the_narrow_question_tells_all_that_the_whole_page_does(vllm_fleet: RayCluster) -> None:
    connection = Connection(vllm_fleet.replicas()[0].endpoint)
    narrow, whole = [await connection.get(question) for question in LoadSettings().questions]
    connection.close()
    assert (narrow.status, whole.status) == (200, 200)
    assert parse(narrow.body) == parse(whole.body)
    assert len(narrow.body) < len(whole.body) / 10


async def test_a_prompt_shows_in_the_figures(vllm_fleet: RayCluster) -> None:
    replica = vllm_fleet.replicas()[0]
    loads: list[EngineLoad] = []
    metrics = EngineMetrics(
        LoadSettings(poll_s=0.1),
        lambda: [Replica(replica.id, replica.endpoint)],
        lambda replica_id, load: loads.append(load),
    )
    polling = asyncio.create_task(metrics.run())

    async def polled() -> bool:
        return bool(loads)

    try:
        await until(polled, "a first reading", 30.0)
        before = loads[-1]
        assert before.capacity_tokens is not None
        assert before.capacity_tokens % BLOCK_TOKENS == 0
        body = {"model": MODEL, "prompt": "figures that show " * 100, "max_tokens": 2}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"http://{replica.endpoint}/v1/completions", json=body) as answer,
        ):
            prompt_tokens = (await answer.json())["usage"]["prompt_tokens"]

        async def shown() -> bool:
            assert before.prompt_tokens_computed is not None
            return loads[-1].prompt_tokens_computed == before.prompt_tokens_computed + prompt_tokens

        await until(shown, f"{prompt_tokens} more tokens computed", 30.0)
    finally:
        polling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await polling
