"""The fleet's size, its models and Serve itself change under real traffic: sessions move no more than they must."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from demo.wait import until
from serve_app.settings import AppSettings
from tests.e2e.conftest import REPLICAS, steady_load
from tests.support.client import Answer, Chat, long_text

if TYPE_CHECKING:
    import aiohttp

    from demo.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SESSIONS = 24


async def scale(stack: Stack, replicas: int) -> None:
    await asyncio.to_thread(stack.cluster.scale, replicas)
    await asyncio.to_thread(stack.wait_for_replicas, replicas)


async def homes(chats: list[Chat]) -> list[str]:
    """Where each session's next turn goes, one after another, so that load moves none of them."""
    answers: list[Answer] = [await chat.say("and now?", max_tokens=1) for chat in chats]
    assert [answer.status for answer in answers] == [200] * len(chats)
    return [answer.replica for answer in answers]


async def test_growing_moves_no_session_and_shrinking_only_those_of_the_replicas_that_go(
    stack: Stack, client: aiohttp.ClientSession
) -> None:
    await scale(stack, 2)
    chats = [Chat(client, stack.url, {"x-session-id": f"member-{number}"}) for number in range(SESSIONS)]
    for number, chat in enumerate(chats):
        chat.messages.append({"role": "system", "content": long_text(f"notes-{number}", 400)})
    two = await homes(chats)
    async with steady_load(stack, client) as outcomes:
        await scale(stack, 8)
    assert set(outcomes) == {"200"}
    # The ring names a new home for 6 of 8 sessions; but 400 tokens of cache are worth more than its order.
    assert await homes(chats) == two
    async with steady_load(stack, client) as outcomes:
        await scale(stack, 2)
    assert set(outcomes) == {"200"}
    staying = {replica.id for replica in stack.cluster.replicas()}
    after = await homes(chats)
    assert set(after) <= staying
    assert [home for home, was in zip(after, two, strict=True) if was in staying and home != was] == []
    assert await homes(chats) == after  # they move once
    await scale(stack, REPLICAS)


async def test_a_replica_that_goes_finishes_what_it_has(stack: Stack, client: aiohttp.ClientSession) -> None:
    # 240 tokens at 25 ms: 6 s, while all but one of the replicas are scaled away.
    talks = [
        asyncio.create_task(Chat(client, stack.url, {"x-session-id": f"long-{number}"}).say("a long story", 240))
        for number in range(12)
    ]
    await scale(stack, 1)
    answers = await asyncio.gather(*talks)
    assert [answer.status for answer in answers] == [200] * 12
    assert len({answer.replica for answer in answers}) > 1
    await scale(stack, REPLICAS)


async def test_two_models_side_by_side(stack: Stack, client: aiohttp.ClientSession) -> None:
    await asyncio.to_thread(
        stack.cluster.deploy, AppSettings(model="other", num_replicas=2), name="other", route_prefix="/other"
    )
    try:
        await asyncio.to_thread(stack.wait_for_replicas, REPLICAS + 2)
        replicas = {
            model: {replica.id for replica in stack.cluster.replicas(name)}
            for model, name in (("sim", "default"), ("other", "other"))
        }
        for number in range(8):
            session = {"x-session-id": f"both-{number}"}
            sim = await Chat(client, stack.url, session).say("hello")
            other = await Chat(client, f"{stack.url}/other", session, {"model": "other"}).say("hello")
            assert (sim.status, other.status) == (200, 200)
            assert sim.replica in replicas["sim"]
            assert other.replica in replicas["other"]
    finally:
        await asyncio.to_thread(stack.cluster.delete, "other")
    await asyncio.to_thread(stack.wait_for_replicas, REPLICAS)


async def test_serves_own_head_stopped_for_ten_seconds_changes_nothing(
    stack: Stack, client: aiohttp.ClientSession
) -> None:
    chat = Chat(client, stack.url, {"x-session-id": "undisturbed"})
    home = (await chat.say("hello")).replica
    heads = [
        process
        for process in psutil.Process(stack.cluster.pid).children(recursive=True)
        if any("dashboard/dashboard.py" in word or "ServeController" in word for word in process.cmdline())
    ]
    assert len(heads) >= 2  # the dashboard with its REST API, and the controller
    try:
        for process in heads:
            process.send_signal(signal.SIGSTOP)

        async def noticed() -> bool:
            await chat.say("still there?", max_tokens=1)
            return bool(stack.spans()[-1]["routing.stale"])

        began_s = asyncio.get_running_loop().time()
        async with steady_load(stack, client) as outcomes:
            await until(noticed, "decisions say that the membership is stale", 15.0)

            async def ten_seconds() -> bool:
                return asyncio.get_running_loop().time() - began_s >= 10.0

            await until(ten_seconds, "ten seconds have passed", 15.0)
    finally:
        for process in heads:
            process.send_signal(signal.SIGCONT)
    assert set(outcomes) == {"200"}
    assert (await chat.say("and now?")).replica == home

    async def found_again() -> bool:
        await chat.say("again", max_tokens=1)
        return not stack.spans()[-1]["routing.stale"]

    await until(found_again, "the feed is found again", 20.0)
