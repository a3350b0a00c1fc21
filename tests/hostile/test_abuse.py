"""Clients that lie, hold on, and flood, on a real Envoy."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING

import psutil
import pytest
import pytest_asyncio

from demo.wait import until
from extproc.core.replica import Replica
from extproc.core.router import RouterSettings
from extproc.envoy_config import EnvoySettings
from tests.support.proxied_fleet import ProxiedFleet, proxied_fleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

DESTINATION = "x-gateway-destination-endpoint"
REQUEST_TIMEOUT_S = 1.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProxiedFleet]:
    settings = EnvoySettings(request_timeout_s=REQUEST_TIMEOUT_S)
    async with proxied_fleet(tmp_path_factory.mktemp("envoy"), envoy=settings) as running:
        yield running


async def raw(fleet: ProxiedFleet, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection of one's own, for requests that no client library would write."""
    host, _, port = fleet.envoy.settings.listen.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    await writer.drain()
    return reader, writer


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """What came until the connection ended, in whichever way."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(1000):
            answer += piece
    return answer


async def answer_to(fleet: ProxiedFleet, request: bytes) -> bytes:
    reader, writer = await raw(fleet, request)
    try:
        return await asyncio.wait_for(all_of(reader), 15)
    finally:
        writer.close()


# --- lies ---


@pytest.mark.parametrize(
    "header",
    [
        DESTINATION,
        DESTINATION.title(),
        DESTINATION.replace("-", "_"),
        f"{DESTINATION}-subset",
        f"{DESTINATION}-served",
        "x-envoy-original-dst-host",
        "x-forwarded-host",
        "host",
    ],
)
async def test_no_header_names_the_replica(fleet: ProxiedFleet, header: str) -> None:
    home = (await fleet.ask(headers={"x-session-id": "victim"})).endpoint
    for forged in (*fleet.endpoints, "169.254.169.254:80"):
        answer = await fleet.ask(headers={"x-session-id": "victim", header: forged})
        assert answer.endpoint == home
        assert fleet.upstream(home).seen[-1].headers.getall(DESTINATION) == [home]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("line", "host"),
    [
        (b"GET http://169.254.169.254/latest/meta-data HTTP/1.1", b"169.254.169.254"),
        (b"GET //169.254.169.254/ HTTP/1.1", b"x"),
        (b"GET /@169.254.169.254/ HTTP/1.1", b"169.254.169.254:80"),
    ],
)
async def test_a_request_for_elsewhere_reaches_the_fleet_alone(fleet: ProxiedFleet, line: bytes, host: bytes) -> None:
    answer = await answer_to(fleet, line + b"\r\nhost: " + host + b"\r\nconnection: close\r\n\r\n")
    assert any(endpoint.encode() in answer for endpoint in fleet.endpoints)


async def test_nobody_is_given_a_tunnel(fleet: ProxiedFleet) -> None:
    seen = [len(upstream.seen) for upstream in fleet.upstreams]
    answer = await answer_to(fleet, b"CONNECT 169.254.169.254:80 HTTP/1.1\r\nhost: 169.254.169.254:80\r\n\r\n")
    assert answer.split()[1].startswith(b"4")
    assert [len(upstream.seen) for upstream in fleet.upstreams] == seen


async def test_envoy_drops_a_bare_carriage_return(fleet: ProxiedFleet) -> None:
    head = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-session-id: a\rx-evil: 1\r\n\r\n"
    assert b" 200 " in await answer_to(fleet, head)
    assert fleet.watch.requests[-1].headers["x-session-id"] == "ax-evil: 1"


@pytest.mark.parametrize("value", [b"a\nb", b"a\0b"])
async def test_a_header_that_would_break_lines_reaches_nobody(fleet: ProxiedFleet, value: bytes) -> None:
    decided, seen = len(fleet.watch.decisions), [len(upstream.seen) for upstream in fleet.upstreams]
    head = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-session-id: "
    answer = await answer_to(fleet, head + value + b"\r\n\r\n")
    assert b" 200 " not in answer
    assert len(fleet.watch.decisions) == decided
    assert [len(upstream.seen) for upstream in fleet.upstreams] == seen


async def test_an_answer_s_headers_are_told_by_replicas_alone(fleet: ProxiedFleet) -> None:
    """A request that brings the counts which replicas report."""
    before = len(fleet.watch.starts)
    lie = {"x-prompt-tokens": "100000", "x-cached-tokens": "100000", "x-queue-depth": "9999"}
    await fleet.ask(headers=lie)
    (start,) = fleet.watch.starts[before:]
    assert (start.prompt_tokens, start.cached_tokens, start.queue_depth) == (None, None, None)


async def test_a_client_cannot_have_one_request_tried_many_times(fleet: ProxiedFleet) -> None:
    retries = {"x-envoy-max-retries": "50", "x-envoy-retry-on": "5xx,gateway-error,retriable-4xx"}
    for upstream in fleet.upstreams:
        upstream.status = 503
        upstream.seen.clear()
    try:
        assert (await fleet.ask(headers=retries)).status == 503
        assert sum(len(upstream.seen) for upstream in fleet.upstreams) == 1 + fleet.envoy.settings.retries
    finally:
        for upstream in fleet.upstreams:
            upstream.status = 200


async def test_an_endpoint_that_is_no_member_is_never_reached(fleet: ProxiedFleet) -> None:
    """Though the router itself should name it: Envoy knows the fleet by its endpoint discovery alone."""
    elsewhere = await asyncio.start_server(lambda reader, writer: reached.append(writer), "127.0.0.1", 0)
    reached: list[asyncio.StreamWriter] = []
    port = elsewhere.sockets[0].getsockname()[1]
    async with elsewhere:
        fleet.router.set_members([Replica("evil", f"127.0.0.1:{port}")], 0.0)
        answer = await fleet.ask()
        assert fleet.watch.decisions[-1].endpoint == f"127.0.0.1:{port}"
        assert answer.endpoint in fleet.endpoints
        assert not reached
    await fleet.announce(Replica(f"replica-{endpoint}", endpoint) for endpoint in fleet.endpoints)


# --- those who hold on ---


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n",
    ],
    ids=["body", "chunks", "headers"],
)
async def test_a_slow_request_is_ended(fleet: ProxiedFleet, sent: bytes) -> None:
    """With a byte now and then, against which a limit for silence alone would not help."""
    decided = len(fleet.watch.decisions)
    reader, writer = await raw(fleet, sent)
    answer = asyncio.create_task(all_of(reader))

    async def dribbled() -> bool:
        with contextlib.suppress(ConnectionError):
            writer.write(b"1\r\nx\r\n" if b"chunked" in sent else b"x")
            await writer.drain()
        return answer.done()

    await until(dribbled, "the slow request is ended", REQUEST_TIMEOUT_S + 15)
    assert b" 408 " in answer.result()
    assert len(fleet.watch.decisions) == decided
    assert fleet.router.open_leases == 0
    writer.close()


async def test_a_slow_answer_is_not_ended(fleet: ProxiedFleet) -> None:
    """The limit is the request's: a generation may take longer, and be silent meanwhile."""
    home = (await fleet.ask(headers={"x-session-id": "slow"})).endpoint
    chunks = fleet.upstream(home).chunks
    await chunks.put(b"data: 0\n\n")
    async with fleet.client.post(fleet.envoy.url + "/stream", headers={"x-session-id": "slow"}) as running:
        await running.content.readany()
        await asyncio.sleep(2 * REQUEST_TIMEOUT_S)
        await chunks.put(b"data: 1\n\n")
        await chunks.put(None)
        assert await running.content.read() == b"data: 1\n\n"
    await fleet.all_released()


# --- floods ---


CAPACITY = 6
"""Two replicas; a replica is full with one more request than `saturation_in_flight`."""


async def test_a_flood_past_capacity_is_shed_and_what_runs_is_unharmed(tmp_path: Path) -> None:
    settings = RouterSettings(saturation_in_flight=2, shed=True, retry_after_s=2.0)
    async with proxied_fleet(tmp_path, size=2, router=settings) as fleet:
        async with contextlib.AsyncExitStack() as running:
            streams = [
                await running.enter_async_context(fleet.client.post(fleet.envoy.url + "/stream"))
                for _ in range(CAPACITY)
            ]
            answers = await asyncio.gather(*(fleet.ask() for _ in range(300)))
            assert Counter(answer.status for answer in answers) == {429: 300}
            assert {answer.headers["Retry-After"] for answer in answers} == {"2"}
            assert sum(len(upstream.seen) for upstream in fleet.upstreams) == CAPACITY
            for upstream in fleet.upstreams:
                for _ in range(len(upstream.seen)):
                    upstream.chunks.put_nowait(None)
            assert [(stream.status, await stream.read()) for stream in streams] == [(200, b"")] * CAPACITY
        await fleet.all_released()
        assert (await fleet.ask()).status == 200


async def test_bodies_that_fill_memory_are_refused_and_what_comes_later_is_served(tmp_path: Path) -> None:
    settings = EnvoySettings(max_heap_bytes=160 << 20, request_timeout_s=15.0)
    async with proxied_fleet(tmp_path, size=1, envoy=settings) as fleet:
        envoy = psutil.Process(fleet.envoy.pid)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 8388608\r\n\r\n"
        writers = []
        try:
            for _ in range(60):
                _, writer = await raw(fleet, head)
                writer.write(bytes(8_000_000))
                writers.append(writer)

            async def refused() -> bool:
                return (await fleet.ask()).status == 503

            await until(refused, "a new request is refused")
            peak_bytes = envoy.memory_info().rss
            print(f"{len(writers)} bodies of 8 MB: Envoy holds {peak_bytes / 1e6:.0f} MB")
        finally:
            for writer in writers:
                writer.transport.abort()

        async def served() -> bool:
            return (await fleet.ask()).status == 200

        await until(served, "requests are served again", 20.0)


async def test_admin_ports_are_where_they_were_configured(fleet: ProxiedFleet) -> None:
    """Envoy's can stop Envoy, and is on loopback by default."""
    listening = {
        f"{each.laddr.ip}:{each.laddr.port}"
        for each in psutil.Process(fleet.envoy.pid).net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }
    assert listening == {fleet.envoy.settings.listen, fleet.envoy.settings.admin}
    assert EnvoySettings().admin.startswith("127.0.0.1:")
