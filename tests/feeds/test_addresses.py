"""Names in membership lists, by the system's own resolver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from extproc.feeds.addresses import WithAddresses
from extproc.feeds.feed import FeedError
from extproc.feeds.static import StaticFeed, StaticReplica

if TYPE_CHECKING:
    from extproc.core.replica import Replica


async def read(*endpoints: str) -> list[Replica]:
    return list(await WithAddresses(StaticFeed(StaticReplica(endpoint) for endpoint in endpoints)).read())


async def test_a_name_becomes_an_address_and_stays_the_id() -> None:
    (replica,) = await read("localhost:8000")
    assert replica.id == "localhost:8000"
    assert replica.endpoint in {"127.0.0.1:8000", "[::1]:8000"}


async def test_addresses_stay_as_they_are() -> None:
    assert [r.endpoint for r in await read("10.0.0.1:8000", "[2001:db8::1]:8000")] == [
        "10.0.0.1:8000",
        "[2001:db8::1]:8000",
    ]


async def test_a_name_that_nobody_knows_fails_the_look() -> None:
    with pytest.raises(FeedError, match=r"nobody\.invalid"):
        await read("localhost:8000", "nobody.invalid:8000")
