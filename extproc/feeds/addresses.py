"""Names to addresses: Envoy's endpoint discovery takes no names, and neither does a ring that must not wait."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from extproc.address import join_address, split_address
from extproc.feeds.feed import FeedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.replica import Replica
    from extproc.feeds.feed import MembershipFeed

ADDRESS_LIFE_S: Final = 5.0
"""The system's resolver does not tell how long an address holds; this is what CoreDNS and Docker set."""


class WithAddresses:
    """A feed whose replicas' names are looked up by the system's resolver (/etc/hosts, DNS).

    A replica keeps its id, hence its place on the ring, when its name gets another address.
    """

    def __init__(self, feed: MembershipFeed) -> None:
        self._feed = feed
        self._found: dict[str, tuple[str, float]] = {}  # host -> address, until when (s)

    async def read(self) -> Sequence[Replica]:
        replicas = await self._feed.read()
        return await asyncio.gather(*(self._resolved(replica) for replica in replicas))

    async def close(self) -> None:
        await self._feed.close()

    async def _resolved(self, replica: Replica) -> Replica:
        host, port = split_address(replica.endpoint)
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return replace(replica, endpoint=join_address(await self._address(host), port))
        return replica

    async def _address(self, host: str) -> str:
        loop = asyncio.get_running_loop()
        address, until_s = self._found.get(host, ("", 0.0))
        if loop.time() < until_s:
            return address
        try:
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise FeedError(f"{host}: {error}") from error
        address = str(found[0][4][0])
        self._found[host] = (address, loop.time() + ADDRESS_LIFE_S)
        return address
