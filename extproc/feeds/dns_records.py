"""Members by DNS: every address of a name, or every service of an SRV record.

Records are kept as long as they say; a name that vanishes is a failed look, since that is what a name server's
trouble looks like too, and a fleet of none is announced by nobody.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final

import dns.asyncresolver
import dns.exception
import dns.rdatatype
import dns.resolver

from extproc.address import join_address, split_address
from extproc.core.replica import Replica
from extproc.feeds.feed import FeedError

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOK_TIMEOUT_S: Final = 2.0
SRV_WEIGHT: Final = 100
"""An SRV record's weights are whole numbers: 100 is the fleet's ordinary replica. 0, the usual value, says nothing."""


class DnsFeed:
    """name: "host:port" for all addresses of a host, or "_service._protocol.host" for SRV records.

    server: "ip:port" of the name server; empty: the system's.
    """

    def __init__(self, name: str, server: str = "") -> None:
        self._name = name
        self._resolver = dns.asyncresolver.Resolver(configure=not server)
        self._resolver.lifetime = LOOK_TIMEOUT_S
        self._resolver.cache = dns.resolver.Cache()
        if server:
            address, port = split_address(server)
            self._resolver.nameservers = [address]
            self._resolver.port = port

    async def read(self) -> Sequence[Replica]:
        try:
            found = await (self._services() if self._name.startswith("_") else self._addresses())
        except dns.exception.DNSException as error:
            raise FeedError(f"{self._name}: {error}") from error
        return tuple(sorted(found, key=lambda replica: replica.id))

    async def close(self) -> None:
        pass

    async def _addresses(self) -> list[Replica]:
        host, port = split_address(self._name)
        answers = await self._resolver.resolve_name(host)
        endpoints = [join_address(address, port) for address in answers.addresses()]
        return [Replica(endpoint, endpoint) for endpoint in endpoints]

    async def _services(self) -> list[Replica]:
        replicas = []
        for record in await self._resolver.resolve(self._name, dns.rdatatype.SRV):
            target = record.target.to_text(omit_final_dot=True)
            # The name is the id where there is one: a pod keeps it when its address changes.
            name = join_address(target, record.port)
            for address in (await self._resolver.resolve_name(target)).addresses():
                replicas.append(Replica(name, join_address(address, record.port), weight=_weight(record.weight)))
                break
        return replicas


def _weight(weight: int) -> float:
    return weight / SRV_WEIGHT if weight else 1.0


def check_name(name: str) -> None:
    """Raises ValueError on what is neither "host:port" nor the name of a service."""
    if name.startswith("_"):
        return
    host, _ = split_address(name)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return
    raise ValueError(f"{name!r} is an address, not a name")
