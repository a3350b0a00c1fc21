from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest

from demo.stack import Stack
from serve_app.settings import AppSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

REPLICAS = 4


@pytest.fixture(scope="package")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Real Ray Serve with four simulated replicas, the router and Envoy; one for all tests of this folder."""
    with Stack(AppSettings(num_replicas=REPLICAS), tmp_path_factory.mktemp("stack")) as stack:
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
