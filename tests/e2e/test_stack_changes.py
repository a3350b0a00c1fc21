"""What happens to traffic on the real stack while replicas and the router come and go."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

from demo.wait import until
from tests.e2e.conftest import REPLICAS, steady_load
from tests.support.client import Chat

if TYPE_CHECKING:
    import aiohttp

    from demo.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


async def test_scaling_and_redeploying_lose_no_request(stack: Stack, client: aiohttp.ClientSession) -> None:
    async with steady_load(stack, client) as outcomes:
        for replicas in (6, 3, REPLICAS):
            await asyncio.to_thread(stack.cluster.scale, replicas)
            await asyncio.to_thread(stack.wait_for_replicas, replicas)
        before = {replica.id for replica in stack.cluster.replicas()}
        await asyncio.to_thread(
            stack.cluster.deploy, stack.app.model_copy(update={"num_replicas": REPLICAS, "revision": "again"})
        )
        await asyncio.to_thread(stack.wait_for_replicas, REPLICAS)
    assert not before & {replica.id for replica in stack.cluster.replicas()}
    assert set(outcomes) == {"200"}
    assert outcomes["200"] > 100


async def test_a_killed_replica_costs_the_next_turn_only_its_cache(stack: Stack, client: aiohttp.ClientSession) -> None:
    chat = Chat(client, stack.url, {"x-session-id": "survives"})
    home = (await chat.say("hello")).replica
    pid = next(replica.pid for replica in stack.cluster.replicas() if replica.id == home)
    os.kill(pid, signal.SIGKILL)
    answer = await chat.say("are you still there?")
    assert answer.status == 200
    assert answer.replica != home

    async def replaced() -> bool:
        replicas = {replica.id for replica in stack.cluster.replicas()}
        return home not in replicas and len(replicas) == REPLICAS

    await until(replaced, "Serve has started another", 60.0)
    await asyncio.to_thread(stack.wait_for_replicas, REPLICAS)
    # The session has a home again, the same for every turn.
    assert len({(await chat.say("and now?")).replica for _ in range(3)}) == 1


async def test_without_the_router_sessions_stick_by_header_and_affinity_returns_with_it(
    stack: Stack, client: aiohttp.ClientSession
) -> None:
    by_body = Chat(client, stack.url, fields={"session_id": "by-body"})
    home = (await by_body.say("hello")).replica
    stack.kill_router()
    by_header = Chat(client, stack.url, {"x-session-id": "sticks"})
    answers = [await by_header.say(f"turn {number}") for number in range(6)]
    assert [answer.status for answer in answers] == [200] * 6
    assert len({answer.replica for answer in answers}) == 1  # Envoy's own ring hash
    without_session = [await Chat(client, stack.url).say("hello") for _ in range(4)]
    assert [answer.status for answer in without_session] == [200] * 4

    await asyncio.to_thread(stack.start_router)
    await asyncio.to_thread(stack.wait_for_replicas, REPLICAS)
    # A new router has no memory, but the ring names the same home.
    assert {(await by_body.say(f"turn {number}")).replica for number in range(5)} == {home}
