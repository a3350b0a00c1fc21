from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from tests.workers.house import House

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest_asyncio.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    yield house
    house.close()
