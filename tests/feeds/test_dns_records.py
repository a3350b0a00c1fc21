"""Members by DNS, asked of a real name server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from extproc.core.replica import Replica
from extproc.feeds.dns_records import DnsFeed, check_name
from extproc.feeds.feed import FeedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

Zone = dict[tuple[str, str], list[str]]
TTL_S = 0  # asked anew each time

FLEET: Zone = {
    ("fleet.test.", "A"): ["10.0.0.2", "10.0.0.1"],
    ("fleet.test.", "AAAA"): ["2001:db8::1"],
    ("_http._tcp.fleet.test.", "SRV"): ["0 0 8000 pod-0.fleet.test.", "0 200 8001 pod-1.fleet.test."],
    ("pod-0.fleet.test.", "A"): ["10.0.1.1"],
    ("pod-1.fleet.test.", "A"): ["10.0.1.2"],
}


class NameServer(asyncio.DatagramProtocol):
    """Answers from a zone over UDP."""

    def __init__(self, zone: Mapping[tuple[str, str], list[str]]) -> None:
        self.zone = dict(zone)
        self.silent = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, peer: Any) -> None:
        if self.silent:
            return
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = question.name.to_text().lower(), question.rdtype.name
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.AA
        if records := self.zone.get((name, kind)):
            answer.answer.append(dns.rrset.from_text(question.name, TTL_S, "IN", kind, *records))
        elif not any(known == name for known, _ in self.zone):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        self._transport.sendto(answer.to_wire(), peer)


@contextlib.asynccontextmanager
async def name_server(zone: Zone) -> AsyncIterator[tuple[NameServer, str]]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(lambda: NameServer(zone), ("127.0.0.1", 0))
    try:
        yield server, f"127.0.0.1:{transport.get_extra_info('sockname')[1]}"
    finally:
        transport.close()


async def test_every_address_of_a_host_is_a_replica() -> None:
    async with name_server(FLEET) as (_, address):
        assert list(await DnsFeed("fleet.test:8000", address).read()) == [
            Replica("10.0.0.1:8000", "10.0.0.1:8000"),
            Replica("10.0.0.2:8000", "10.0.0.2:8000"),
            Replica("[2001:db8::1]:8000", "[2001:db8::1]:8000"),
        ]


async def test_a_service_names_its_replicas_with_ports_and_weights() -> None:
    async with name_server(FLEET) as (_, address):
        assert list(await DnsFeed("_http._tcp.fleet.test", address).read()) == [
            Replica("pod-0.fleet.test:8000", "10.0.1.1:8000", weight=1.0),
            Replica("pod-1.fleet.test:8001", "10.0.1.2:8001", weight=2.0),
        ]


async def test_changes_are_seen_and_a_moved_pod_keeps_its_id() -> None:
    async with name_server(FLEET) as (server, address):
        feed = DnsFeed("_http._tcp.fleet.test", address)
        before = await feed.read()
        server.zone["pod-0.fleet.test.", "A"] = ["10.0.9.9"]
        after = await feed.read()
        assert [r.id for r in before] == [r.id for r in after]
        assert after[0].endpoint == "10.0.9.9:8000"


@pytest.mark.parametrize("name", ["nobody.test:8000", "_http._tcp.nobody.test"])
async def test_a_name_that_is_not_there_fails_the_look(name: str) -> None:
    async with name_server(FLEET) as (_, address):
        with pytest.raises(FeedError, match="nobody"):
            await DnsFeed(name, address).read()


async def test_a_silent_name_server_fails_the_look_in_time() -> None:
    async with name_server(FLEET) as (server, address):
        server.silent = True
        async with asyncio.timeout(10):
            with pytest.raises(FeedError):
                await DnsFeed("fleet.test:8000", address).read()


@pytest.mark.parametrize("name", ["fleet.test", "10.0.0.1:8000", "fleet.test:http"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"fleet|10\.0\.0\.1"):
        check_name(name)
