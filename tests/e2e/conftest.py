from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import pytest

from demo.stack import Stack
from serve_app.settings import AppSettings
from tests.support.client import Chat

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

REPLICAS = 4
SATURATION = 16
"""The saturation line of the stack under test: few enough requests for a test to reach it."""
CLIENTS = 8


@pytest.fixture(scope="package")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Real Ray Serve with four simulated replicas, the router and Envoy; one for all tests of this folder."""
    config = {"routing": {"saturation_in_flight": SATURATION}}
    with Stack(AppSettings(num_replicas=REPLICAS), tmp_path_factory.mktemp("stack"), config=config) as stack:
        yield stack


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    """The stack as it should be before a test: all replicas there, the router asked."""
    shared_stack.wait_for_replicas(REPLICAS)
    return shared_stack


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


@asynccontextmanager
async def steady_load(stack: Stack, client: aiohttp.ClientSession) -> AsyncIterator[Counter[str]]:
    """Dialogues without pause while the block runs; counts statuses, and what was no answer by its name."""
    outcomes: Counter[str] = Counter()
    ended = asyncio.Event()

    async def talk(number: int) -> None:
        rounds = 0
        while not ended.is_set():
            rounds += 1
            chat = Chat(client, stack.url, {"x-session-id": f"load-{number}-{rounds}"})
            for turn in range(3):
                try:
                    answer = await chat.say(f"turn {turn}")
                    outcomes["200" if answer.status == 200 else f"{answer.status} {answer.replica} {answer.text}"] += 1
                except aiohttp.ClientError as error:
                    outcomes[type(error).__name__] += 1

    talks = [asyncio.create_task(talk(number)) for number in range(CLIENTS)]
    try:
        yield outcomes
    finally:
        ended.set()
        await asyncio.gather(*talks)
