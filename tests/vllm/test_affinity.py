"""Real vLLM behind the router and the real Envoy: the second turn finds the first one's cache."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest

from demo.stack import Stack
from serve_app.settings import AppSettings
from tests.support.client import Chat, long_text
from tests.support.metrics import figure
from tests.vllm.conftest import BLOCK_TOKENS, MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from serve_app.cluster import RayCluster

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def stack(vllm_fleet: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    app = AppSettings(num_replicas=len(vllm_fleet.replicas()))
    with Stack(app, tmp_path_factory.mktemp("vllm-stack"), cluster=vllm_fleet) as stack:
        yield stack


async def hits_by_replica(http: aiohttp.ClientSession, cluster: RayCluster) -> dict[str, float]:
    """Prompt tokens that each replica's vLLM has found in its prefix cache so far."""

    async def hits(endpoint: str) -> float:
        async with http.get(f"http://{endpoint}/metrics") as page:
            return figure(await page.text(), "vllm:prefix_cache_hits_total")

    replicas = cluster.replicas()
    counts = await asyncio.gather(*(hits(replica.endpoint) for replica in replicas))
    return {replica.id: count for replica, count in zip(replicas, counts, strict=True)}


@pytest.mark.parametrize("headers", [{"x-session-id": "dialogue"}, {}], ids=["session header", "no session"])
async def test_the_second_turn_hits_the_cache_of_the_first_and_no_other(
    stack: Stack, vllm_fleet: RayCluster, headers: dict[str, str]
) -> None:
    async with aiohttp.ClientSession() as http:
        chat = Chat(http, stack.url, headers, {"model": MODEL})
        chat.messages.append({"role": "system", "content": long_text(f"notes {headers}", 2000)})
        first = await chat.say("What is in the notes?")
        assert first.status == 200, first.text
        before = await hits_by_replica(http, vllm_fleet)
        second = await chat.say("And what is not?")
        assert second.status == 200, second.text
        after = await hits_by_replica(http, vllm_fleet)
    assert second.replica == first.replica
    risen = {replica: after[replica] - before[replica] for replica in after}
    assert risen[first.replica] >= BLOCK_TOKENS
    assert [replica for replica, rise in risen.items() if rise] == [first.replica]
    # The router was told by the first-token middleware, before the first byte of the body.
    span = next(span for span in reversed(stack.spans()) if span["routing.replica.id"] == first.replica)
    assert span["gen_ai.usage.input_tokens"] > 0
