"""Clients that give up, through Envoy: their requests are no longer counted as in flight anywhere."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import TYPE_CHECKING

import aiohttp
import pytest

from demo.wait import until
from tests.support.client import CHAT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.chaos.site import Site

pytestmark = pytest.mark.chaos

CLIENTS = 16
REQUESTS = 100
PHASES = ("within its body", "before its answer", "within its answer")
BODY = json.dumps({"stream": True, "max_tokens": 4, "messages": [{"role": "user", "content": "word " * 200}]}).encode()


async def half_a_body() -> AsyncIterator[bytes]:
    yield BODY[: len(BODY) // 2]
    await asyncio.Event().wait()


async def ask(client: aiohttp.ClientSession, url: str, session: str, abort: str) -> None:
    headers = {"content-type": "application/json", "x-session-id": session}
    body = half_a_body() if abort == PHASES[0] else BODY
    async with client.post(url + CHAT, data=body, headers=headers) as response:
        if abort != PHASES[2]:
            await response.read()
        else:
            await response.content.readany()  # leaving the block closes the connection


async def test_nothing_is_left_of_requests_that_are_given_up(running: Site) -> None:
    given_up = {phase: 0 for phase in PHASES}

    async def talk(number: int) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as client:
            for turn, abort in zip(range(REQUESTS), itertools.cycle([*PHASES, "", ""]), strict=False):
                asking = ask(client, running.envoy.url, f"{number}-{turn}", abort)
                if abort in PHASES[:2]:
                    # Long enough to be decided, too short for a first token to have come (12 ms).
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(asking, 0.008)
                else:
                    await asking
                given_up[abort] = given_up.get(abort, 0) + 1

    await asyncio.gather(*(talk(number) for number in range(CLIENTS)))
    assert all(given_up[phase] > CLIENTS for phase in PHASES)
    await running.router.wait_for_metric("extproc_open_leases", 0)

    async def idle() -> bool:
        return await asyncio.to_thread(running.envoy.stat, "http.clients.downstream_rq_active") == 0

    await until(idle, "envoy has no request left")
