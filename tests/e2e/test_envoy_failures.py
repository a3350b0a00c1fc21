"""What a real Envoy does when a replica or the router fails."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import sys
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

import aiohttp
import pytest
import pytest_asyncio

from demo.ports import free_port
from demo.process import Process
from demo.wait import until
from extproc.core.replica import Replica
from extproc.envoy_config import EnvoySettings
from extproc.server import ServerSettings, Transport
from tests.support.envoy import Envoy
from tests.support.proxied_fleet import CHAT, Answer, ProxiedFleet, ask, proxied_fleet, replicas_of
from tests.support.upstreams import Upstream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.e2e

MIB = 1 << 20
TIMEOUT_S = EnvoySettings().message_timeout_s


@pytest_asyncio.fixture(params=list(Transport))
async def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[ProxiedFleet]:
    async with proxied_fleet(tmp_path, server=ServerSettings("127.0.0.1:0", transport=request.param)) as running:
        yield running


# --- replicas ---


@pytest.mark.parametrize("failure", ["503", "refused"])
@pytest.mark.parametrize("by", ["header", "body"])
@pytest.mark.parametrize("size", [10, 4 * MIB], ids=["small", "4 MiB"])
async def test_a_retry_goes_to_another_replica(fleet: ProxiedFleet, failure: str, by: str, size: int) -> None:
    headers = {"x-session-id": "s"} if by == "header" else {}
    body = b'{"session_id": "s", "prompt": "%s"}' % (b"x" * size)
    home = (await fleet.ask(body, headers)).endpoint
    if failure == "503":
        fleet.upstream(home).status = 503
    else:
        await fleet.upstream(home).stop()
    for _ in range(5):
        answer = await fleet.ask(body, headers)
        assert (answer.status, answer.sha256) == (200, hashlib.sha256(body).hexdigest())
        assert answer.endpoint != home
        assert fleet.watch.decisions[-1].endpoint == home
        assert fleet.watch.starts[-1].served_endpoint == answer.endpoint


async def test_a_retry_does_not_come_back_to_a_replica_that_failed(fleet: ProxiedFleet) -> None:
    """Three attempts, three replicas, though the fallback's ring names one first for the session."""
    for upstream in fleet.upstreams:
        upstream.status = 503
    for number in range(10):
        before = [len(upstream.seen) for upstream in fleet.upstreams]
        answer = await fleet.ask(headers={"x-session-id": str(number)})
        assert answer.status == 503
        tried = [len(upstream.seen) - count for upstream, count in zip(fleet.upstreams, before, strict=True)]
        assert sorted(tried) == [0, 1, 1, 1]


@pytest.mark.parametrize("status", [400, 404, 429, 500, 502])
async def test_other_errors_are_the_replica_s_own_answer(fleet: ProxiedFleet, status: int) -> None:
    for upstream in fleet.upstreams:
        upstream.status = status
    assert (await fleet.ask()).status == status
    assert sum(len(upstream.seen) for upstream in fleet.upstreams) == 1


async def test_an_answer_that_has_begun_is_not_tried_again(fleet: ProxiedFleet) -> None:
    home = fleet.upstream((await fleet.ask(headers={"x-session-id": "s"})).endpoint)
    await home.chunks.put(b"begun")
    async with fleet.client.post(fleet.envoy.url + "/stream", headers={"x-session-id": "s"}) as response:
        assert await response.content.readany() == b"begun"
        await home.chunks.put(b"")
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    assert [seen.path for upstream in fleet.upstreams for seen in upstream.seen].count("/stream") == 1
    await fleet.all_released()


async def test_an_answer_that_ends_as_it_begins_is_not_tried_again_either(fleet: ProxiedFleet) -> None:
    """While its headers are on their way through the router, the client gets Envoy's own error; later a cut stream."""
    home = fleet.upstream((await fleet.ask(headers={"x-session-id": "s"})).endpoint)
    for _ in range(8):
        await home.chunks.put(b"")
        with contextlib.suppress(aiohttp.ClientError):
            async with fleet.client.post(fleet.envoy.url + "/stream", headers={"x-session-id": "s"}) as response:
                assert response.status in {502, 503} or await response.read() is None
    assert [seen.path for upstream in fleet.upstreams for seen in upstream.seen].count("/stream") == 8
    await fleet.all_released()


async def test_a_fleet_that_refuses_connections_is_503(fleet: ProxiedFleet) -> None:
    for upstream in fleet.upstreams:
        await upstream.stop()
    assert (await fleet.ask()).status == 503
    await fleet.all_released()
    assert fleet.watch.finished_count == len(fleet.watch.decisions)


async def test_idle_connections_are_closed_before_the_replica_closes_them(fleet: ProxiedFleet) -> None:
    assert (await fleet.ask()).status == 200

    async def closed() -> bool:
        return await asyncio.to_thread(fleet.envoy.stat, "cluster.fleet.upstream_cx_idle_timeout") > 0

    await until(closed, "envoy has closed the idle connection", timeout_s=5.0)  # uvicorn's keep-alive


async def test_a_request_whose_replica_dies_before_it_answers_is_passed_on_but_not_for_ever(
    fleet: ProxiedFleet,
) -> None:
    home = fleet.upstream((await fleet.ask(headers={"x-session-id": "s"})).endpoint)
    home.status = 0
    answer = await fleet.ask(headers={"x-session-id": "s"})
    assert answer.status == 200
    assert answer.endpoint != home.endpoint
    # One that kills every replica it meets stops after the first and two retries.
    for upstream in fleet.upstreams:
        upstream.status = 0
        upstream.seen.clear()
    assert (await fleet.ask(headers={"x-session-id": "s"})).status == 503
    assert sum(len(upstream.seen) for upstream in fleet.upstreams) == 3


# --- endpoints ---


async def test_a_change_of_the_fleet_is_known_once_it_is_acknowledged(fleet: ProxiedFleet) -> None:
    late = Upstream()
    await late.start()
    try:
        known = replicas_of(fleet.endpoints)
        assert await fleet.announce([*known, Replica("late", late.endpoint)])
        assert fleet.envoy.endpoints() == {*fleet.endpoints, late.endpoint}
        assert await fleet.announce([Replica("late", late.endpoint)])
        for _ in range(10):
            assert (await fleet.ask()).endpoint == late.endpoint
        assert await fleet.announce(known)
        assert fleet.envoy.endpoints() == set(fleet.endpoints)
    finally:
        await late.stop()


async def test_a_request_under_way_outlives_its_endpoint(fleet: ProxiedFleet) -> None:
    home = (await fleet.ask(headers={"x-session-id": "s"})).endpoint
    chunks = fleet.upstream(home).chunks
    await chunks.put(b"one")
    async with fleet.client.post(fleet.envoy.url + "/stream", headers={"x-session-id": "s"}) as response:
        assert await response.content.readany() == b"one"
        assert await fleet.announce(replica for replica in replicas_of(fleet.endpoints) if replica.endpoint != home)
        await chunks.put(b"two")
        await chunks.put(None)
        assert await response.content.read() == b"two"
    assert (await fleet.ask(headers={"x-session-id": "s"})).endpoint != home


async def test_a_route_to_an_endpoint_that_envoy_does_not_know_is_served_by_another(fleet: ProxiedFleet) -> None:
    fleet.router.set_members([Replica("unknown", "127.0.0.1:1")], monotonic())
    answer = await fleet.ask()
    assert answer.status == 200
    assert answer.endpoint in fleet.endpoints


async def test_the_fallback_leaves_out_who_is_draining(fleet: ProxiedFleet) -> None:
    first, *others = fleet.endpoints
    await fleet.announce([Replica("leaving", first, draining=True), *replicas_of(others)])
    await fleet.silence_router()
    reached = {(await fleet.ask(headers={"x-session-id": str(number)})).endpoint for number in range(40)}
    assert reached == set(others)


# --- the router ---


@dataclass
class Proxied:
    """A fleet whose router is a process of its own."""

    client: aiohttp.ClientSession
    upstreams: list[Upstream]
    envoy: Envoy
    address: str
    directory: Path
    router: Process

    @property
    def endpoints(self) -> list[str]:
        return [upstream.endpoint for upstream in self.upstreams]

    async def start_router(self) -> None:
        """Start it again and wait until Envoy asks it."""
        self.router = start_router(self.address, self.endpoints, self.directory)
        await self.wait_routed()

    async def wait_routed(self) -> None:
        async def routed() -> bool:
            return await self.routed("probe") is not None

        await until(routed, "the router is asked")

    async def ask(self, headers: dict[str, str] | None = None) -> Answer:
        return await ask(self.client, self.envoy.url, b"{}", headers)

    async def routed(self, session: str) -> str | None:
        """The endpoint that the router named for a session; None where it was silent."""
        answer = await self.ask({"x-session-id": session})
        upstream = next((each for each in self.upstreams if each.endpoint == answer.endpoint), None)
        return None if upstream is None else upstream.seen[-1].headers.get("x-gateway-destination-endpoint")


def start_router(address: str, endpoints: list[str], directory: Path) -> Process:
    return Process([sys.executable, "-m", "tests.support.static_router", address, *endpoints], directory / "router.log")


@pytest_asyncio.fixture
async def proxied(tmp_path: Path) -> AsyncIterator[Proxied]:
    async with contextlib.AsyncExitStack() as stack:
        upstreams = [Upstream() for _ in range(4)]
        for upstream in upstreams:
            await upstream.start()
            stack.push_async_callback(upstream.stop)
        client = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)))
        address = f"127.0.0.1:{free_port()}"
        router = start_router(address, [upstream.endpoint for upstream in upstreams], tmp_path)
        envoy = await asyncio.to_thread(Envoy, tmp_path, address)
        stack.callback(envoy.stop)
        running = Proxied(client, upstreams, envoy, address, tmp_path, router)
        stack.callback(lambda: running.router.stop())  # noqa: PLW0108  # the one running then
        await asyncio.to_thread(envoy.wait_for_router, running.endpoints)
        yield running


SPELLINGS = ["x-session-id", "X-Session-Id", "x_session_id", "session-id", "session_id"]


async def test_without_its_router_envoy_serves_and_sessions_stick(proxied: Proxied) -> None:
    before = [await proxied.routed(f"s{number}") for number in range(20)]
    assert None not in before
    proxied.router.kill()
    homes: dict[int, str] = {}
    for _ in range(3):
        for number in range(20):
            answer = await proxied.ask({SPELLINGS[number % len(SPELLINGS)]: f"s{number}"})
            assert answer.status == 200
            assert homes.setdefault(number, answer.endpoint) == answer.endpoint
    assert len(set(homes.values())) > 1
    assert {(await proxied.ask()).status for _ in range(20)} == {200}
    await proxied.start_router()
    assert [await proxied.routed(f"s{number}") for number in range(20)] == before


async def test_every_spelling_of_the_session_header_means_the_same_session(proxied: Proxied) -> None:
    proxied.router.kill()
    for number in range(5):
        reached = {(await proxied.ask({name: f"s{number}"})).endpoint for name in SPELLINGS}
        assert len(reached) == 1


async def test_requests_without_a_session_are_spread_while_the_router_is_gone(proxied: Proxied) -> None:
    proxied.router.kill()
    reached = {(await proxied.ask()).endpoint for _ in range(40)}
    assert reached == set(proxied.endpoints)


async def test_a_router_that_dies_under_load_loses_no_request(proxied: Proxied) -> None:
    ended = asyncio.Event()

    async def client(number: int) -> list[int]:
        statuses = []
        while not ended.is_set():
            statuses.append((await proxied.ask({"x-session-id": str(number)})).status)
        return statuses

    clients = [asyncio.create_task(client(number)) for number in range(8)]
    await asyncio.to_thread(proxied.router.kill)
    await proxied.start_router()
    ended.set()
    statuses = [status for each in await asyncio.gather(*clients) for status in each]
    assert set(statuses) == {200}
    assert proxied.envoy.stat("http.clients.ext_proc.failure_mode_allowed") > 0


async def test_a_router_that_leaves_politely_is_not_missed(proxied: Proxied) -> None:
    proxied.router.stop()
    assert {(await proxied.ask({"x-session-id": str(number)})).status for number in range(20)} == {200}


async def test_an_answer_under_way_outlives_its_router(proxied: Proxied) -> None:
    home = await proxied.routed("s")
    chunks = next(each for each in proxied.upstreams if each.endpoint == home).chunks
    await chunks.put(b"one")
    async with proxied.client.post(proxied.envoy.url + "/stream", headers={"x-session-id": "s"}) as response:
        assert await response.content.readany() == b"one"
        proxied.router.kill()
        await chunks.put(b"two")
        await chunks.put(None)
        assert await response.content.read() == b"two"


async def test_a_frozen_router_delays_a_request_at_most_by_the_message_timeout(proxied: Proxied) -> None:
    home = await proxied.routed("s")
    proxied.router.send(signal.SIGSTOP)
    began_s = monotonic()
    assert (await proxied.ask({"x-session-id": "s"})).status == 200
    assert monotonic() - began_s < 2 * TIMEOUT_S  # as much again for a busy machine

    async def given_up() -> bool:
        return not await asyncio.to_thread(proxied.envoy.sees_router)

    await until(given_up, "the health check has failed")
    slowest_s = 0.0
    for number in range(20):
        began_s = monotonic()
        assert (await proxied.ask({"x-session-id": str(number)})).status == 200
        slowest_s = max(slowest_s, monotonic() - began_s)
    assert slowest_s < 0.9 * TIMEOUT_S  # nobody waits for it any more
    proxied.router.send(signal.SIGCONT)
    await proxied.wait_routed()
    assert await proxied.routed("s") == home


async def test_envoy_may_be_started_first(proxied: Proxied, tmp_path: Path) -> None:
    """Without a router and without endpoints it answers at once, and serves as soon as the router is there."""
    proxied.router.kill()
    directory = tmp_path / "second"
    directory.mkdir()
    with await asyncio.to_thread(Envoy, directory, proxied.address) as envoy:
        assert (await ask(proxied.client, envoy.url, path=CHAT)).status == 503
        proxied.envoy.stop()
        proxied.envoy = envoy
        await proxied.start_router()
        assert await proxied.routed("s") is not None
