"""Dialogues on real Ray Serve behind the real Envoy: each stays where its cache is."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from demo.conversation import AFFINITY, ROUND_ROBIN, Script, Summary, play
from demo.wait import until
from tests.e2e.conftest import SATURATION
from tests.support.client import Chat, ask, long_text
from tests.support.metrics import figure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp

    from demo.stack import Stack

pytestmark = pytest.mark.e2e

BLOCK_TOKENS = 16


async def span_of(stack: Stack, trace_id: str) -> dict[str, Any]:
    """The decision of the request that began this trace."""
    found: list[dict[str, Any]] = []

    async def written() -> bool:
        found[:] = [span for span in stack.spans() if span["trace_id"] == f"0x{trace_id}"]
        return bool(found)

    await until(written, f"a span in trace {trace_id}", 5.0)
    return found[0]


@pytest.mark.parametrize(
    ("headers", "fields", "source"),
    [
        ({"x-session-id": "by-header"}, {}, "header:x-session-id"),
        ({}, {"session_id": "by-body"}, "body:session_id"),
        ({}, {}, "prompt"),
    ],
    ids=["session header", "session_id in the body", "no session: the conversation's head"],
)
async def test_five_turns_of_one_dialogue_stay_on_one_replica(
    stack: Stack, client: aiohttp.ClientSession, headers: dict[str, str], fields: dict[str, str], source: str
) -> None:
    chat = Chat(client, stack.url, headers, fields)
    chat.messages.append({"role": "system", "content": long_text(f"notes for {source}", 1000)})
    answers = [await chat.say(f"question {number}") for number in range(5)]
    assert [answer.status for answer in answers] == [200] * 5
    assert len({answer.replica for answer in answers}) == 1
    # The first turn brought 1,000 tokens; every later one finds all of their whole blocks.
    assert answers[0].cached_tokens == 0
    assert all(answer.cached_tokens >= 1000 - BLOCK_TOKENS for answer in answers[1:])
    assert (await span_of(stack, answers[-1].trace_id))["routing.conversation_source"] == source


async def test_forty_sessions_spread_over_all_replicas(stack: Stack, client: aiohttp.ClientSession) -> None:
    chats = [Chat(client, stack.url, {"x-session-id": f"spread-{number}"}) for number in range(40)]
    answers = await asyncio.gather(*(chat.say("hello there") for chat in chats))
    per_replica = Counter(answer.replica for answer in answers)
    assert len(per_replica) == 4
    assert max(per_replica.values()) <= 2 * 40 / 4


async def test_affinity_beats_round_robin_on_the_same_dialogues(stack: Stack) -> None:
    script = Script(users=6, turns=5, background_tokens=4000)
    round_robin = await play(stack.url, "sim", ROUND_ROBIN, script, lambda turn: None)
    affinity = await play(stack.url, "sim", AFFINITY, script, lambda turn: None)
    assert all(turn.cached_tokens > 0 for turn in affinity if turn.number > 1)
    before, after = Summary.of(round_robin), Summary.of(affinity)
    assert after.hit_rate > before.hit_rate
    assert after.follow_up_ttft_s <= 0.5 * before.follow_up_ttft_s
    assert after.replicas_per_user == 1.0


async def test_a_saturated_home_spills_over_and_the_session_comes_back(
    stack: Stack, client: aiohttp.ClientSession
) -> None:
    chat = Chat(client, stack.url, {"x-session-id": "spills"})
    chat.messages.append({"role": "system", "content": long_text("a long history", 4000)})
    home = (await chat.say("first question")).replica

    # 17 generations of 40 s in the same session: the 17th still finds no more than 16 in flight.
    busy = [
        asyncio.create_task(Chat(client, stack.url, chat.headers, {}, list(chat.messages)).say("go on", 1600))
        for _ in range(SATURATION + 1)
    ]
    try:
        endpoint = next(replica.endpoint for replica in stack.cluster.replicas() if replica.id == home)

        async def saturated() -> bool:
            async with client.get(f"http://{endpoint}/metrics") as page:
                text = await page.text()
            running = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
            return float(running[0].split()[-1]) > SATURATION

        await until(saturated, "the home has 17 requests", 20.0)
        aside = await chat.say("second question")
    finally:
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
    assert aside.status == 200
    assert aside.replica != home
    span = await span_of(stack, aside.trace_id)
    assert (span["routing.reason"], span["routing.primary"], span["routing.replica.id"]) == (
        "spillover",
        home,
        aside.replica,
    )

    # It calms down as soon as its clients are gone, and the session goes home.
    async def calm() -> bool:
        async with client.get(f"{stack.router_admin}/metrics") as page:
            return figure(await page.text(), "extproc_open_leases") == 0

    await until(calm, "every lease is released", 10.0)
    back = await chat.say("third question")
    assert back.replica == home
    assert (await span_of(stack, back.trace_id))["routing.reason"] == "session"


async def test_a_forged_routing_header_changes_nothing(stack: Stack, client: aiohttp.ClientSession) -> None:
    chat = Chat(client, stack.url, {"x-session-id": "honest"})
    home = (await chat.say("hello")).replica
    other = next(replica.endpoint for replica in stack.cluster.replicas() if replica.id != home)
    forged = {"x-session-id": "honest", "x-gateway-destination-endpoint": other}
    for _ in range(3):
        assert (await Chat(client, stack.url, forged).say("hello")).replica == home


async def test_streams_pass_chunk_by_chunk_and_leaving_releases_the_lease(
    stack: Stack, client: aiohttp.ClientSession
) -> None:
    trace_id = "5" * 32
    body = {"model": "sim", "messages": [{"role": "user", "content": "talk"}], "stream": True, "max_tokens": 2000}
    headers = {"traceparent": f"00-{trace_id}-{'6' * 16}-01"}
    loop = asyncio.get_running_loop()
    arrivals_s = []
    # 2,000 tokens at 25 ms would take 50 s; the client leaves after 8 chunks.
    async with client.post(f"{stack.url}/v1/chat/completions", json=body, headers=headers) as response:
        async for line in response.content:
            if line.startswith(b"data: "):
                arrivals_s.append(loop.time())
            if len(arrivals_s) == 8:
                break
        assert arrivals_s[-1] - arrivals_s[0] > 5 * 0.025  # as they are made, not all at once
        assert not [span for span in stack.spans() if span["trace_id"] == f"0x{trace_id}"]  # the lease is held
        response.close()
    await span_of(stack, trace_id)  # written at the stream's end, when the lease is released


async def chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 1000):
        yield body[start : start + 1000]


CHAT_BODY = b'{"model": "sim", "messages": [{"role": "user", "content": "%s"}], "max_tokens": 1}'


@pytest.mark.parametrize(
    ("body", "method", "path", "status"),
    [
        (CHAT_BODY % (b"long " * (4 * 1024 * 1024 // 5)), "POST", "/v1/chat/completions", 400),  # beyond any context
        (CHAT_BODY % b"short", "POST", "/v1/chat/completions", 200),
        (b'{"model": "sim", "messages": [', "POST", "/v1/chat/completions", 400),
        (b"", "POST", "/v1/chat/completions", 400),
        (None, "GET", "/v1/models", 200),
    ],
    ids=["4 MiB", "chunked", "broken JSON", "empty", "GET"],
)
async def test_every_request_reaches_a_replica(
    request: pytest.FixtureRequest,
    stack: Stack,
    client: aiohttp.ClientSession,
    body: bytes | None,
    method: str,
    path: str,
    status: int,
) -> None:
    sent = chunks(body) if body and request.node.callspec.id == "chunked" else body
    answer = await ask(client, stack.url, sent, method=method, path=path)
    assert answer.replica in {replica.id for replica in stack.cluster.replicas()}  # answered by an engine, not by Envoy
    assert answer.status == status
    assert (await span_of(stack, answer.trace_id))["routing.replica.id"] == answer.replica
