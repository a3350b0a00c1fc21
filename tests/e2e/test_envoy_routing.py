"""A real Envoy sends each request to exactly the replica that the router names."""

from __future__ import annotations

import asyncio
import collections
import gzip
import hashlib
import json
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from extproc.core.decision import Reason
from extproc.core.router import RouterSettings
from extproc.envoy_config import EnvoySettings
from tests.support.proxied_fleet import ProxiedFleet, proxied_fleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

DESTINATION = "x-gateway-destination-endpoint"
MIB = 1 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProxiedFleet]:
    directory = tmp_path_factory.mktemp("envoy")
    async with proxied_fleet(directory, envoy=EnvoySettings(round_robin_route=True)) as running:
        yield running


def chat(session_id: str, padding: int = 0) -> bytes:
    message = {"role": "user", "content": "x" * padding}
    return json.dumps({"model": "m", "session_id": session_id, "messages": [message]}).encode()


async def in_pieces(body: bytes, size: int = 50_000) -> AsyncIterator[bytes]:
    for at in range(0, len(body), size):
        yield body[at : at + size]


@pytest.mark.parametrize("by", ["header", "body"])
async def test_five_turns_of_a_session_reach_the_replica_that_was_named(fleet: ProxiedFleet, by: str) -> None:
    for session in (f"{by}-{number}" for number in range(8)):
        headers = {"x-session-id": session} if by == "header" else {}
        body = chat(session) if by == "body" else b"{}"
        answers = [await fleet.ask(body, headers) for _ in range(5)]
        named = {decision.endpoint for decision in fleet.watch.decisions[-5:]}
        assert {answer.endpoint for answer in answers} == named
        assert len(named) == 1
    reached = [upstream for upstream in fleet.upstreams if upstream.seen]
    assert len(reached) > 1


async def test_header_and_metadata_agree(fleet: ProxiedFleet) -> None:
    """Envoy selects by metadata; the upstream sees the header."""
    for number in range(8):
        endpoint = (await fleet.ask(headers={"x-session-id": f"agree-{number}"})).endpoint
        assert fleet.upstream(endpoint).seen[-1].headers.getall(DESTINATION) == [endpoint]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["x-session-id", "x_session_id", "Thread-ID", "conversation_id"])
async def test_a_session_may_be_named_in_any_spelling(fleet: ProxiedFleet, name: str) -> None:
    await fleet.ask(headers={name: "spelled", "x-tenant-id": "t", "cookie": "a secret", "user-agent": "test"})
    decision, request = fleet.watch.decisions[-1], fleet.watch.requests[-1]
    assert decision.reason is Reason.SESSION
    assert {each.replace("_", "-") for each in request.headers} == {
        *(":method", ":path", "content-type", "content-length", "x-tenant-id", name.lower().replace("_", "-")),
    }


async def test_a_forged_routing_header_changes_nothing(fleet: ProxiedFleet) -> None:
    home = (await fleet.ask(headers={"x-session-id": "victim"})).endpoint
    for forged in [*fleet.endpoints, "127.0.0.1:1", "169.254.169.254:80", "junk"]:
        answer = await fleet.ask(headers={"x-session-id": "victim", DESTINATION: forged})
        assert answer.endpoint == home
        assert fleet.upstream(home).seen[-1].headers.getall(DESTINATION) == [home]  # type: ignore[attr-defined]


async def test_a_forged_routing_header_is_gone_where_nobody_routes(fleet: ProxiedFleet) -> None:
    reached = set()
    for _ in range(8):
        answer = await fleet.ask(headers={"x-balance": "round_robin", DESTINATION: fleet.endpoints[0]})
        reached.add(answer.endpoint)
        assert DESTINATION not in fleet.upstream(answer.endpoint).seen[-1].headers
    assert reached == set(fleet.endpoints)


BODIES = {
    "small": chat("s"),
    "1 MiB": chat("s", MIB),
    "4 MiB": chat("s", 4 * MIB),
    "just under 8 MiB": chat("s", 8 * MIB - 1000),
    "broken JSON": b'{"model": "m", "messages": [',
    "not JSON": b"\x00\xff\xfe",
    "empty": b"",
    "gzip": gzip.compress(chat("s", 10_000)),
}


@pytest.mark.parametrize("chunked", [False, True], ids=["with its length", "chunked"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_any_body_arrives_whole(fleet: ProxiedFleet, body: bytes, chunked: bool) -> None:
    answer = await fleet.ask(in_pieces(body) if chunked else body)
    assert (answer.status, answer.sha256) == (200, hashlib.sha256(body).hexdigest())
    assert fleet.watch.requests[-1].body == body
    seen = fleet.upstream(answer.endpoint).seen[-1]
    assert ("transfer-encoding" in seen.headers) == (chunked and "content-length" not in seen.headers)


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS"])
async def test_a_request_without_a_body_is_routed(fleet: ProxiedFleet, method: str) -> None:
    decided = len(fleet.watch.decisions)
    answer = await fleet.ask(None, method=method, path="/v1/models")
    assert answer.status == 200
    (decision,) = fleet.watch.decisions[decided:]
    assert decision.endpoint is not None
    assert fleet.upstream(decision.endpoint).seen[-1].method == method


@pytest.mark.parametrize("chunked", [False, True], ids=["with its length", "chunked"])
async def test_a_body_over_the_limit_is_413_and_reaches_nobody(fleet: ProxiedFleet, chunked: bool) -> None:
    before = [len(upstream.seen) for upstream in fleet.upstreams]
    body = chat("s", 8 * MIB + 1000)
    answer = await fleet.ask(in_pieces(body) if chunked else body)
    assert answer.status == 413
    assert [len(upstream.seen) for upstream in fleet.upstreams] == before
    await fleet.all_released()


async def test_an_upload_may_be_longer_since_its_body_is_not_read(fleet: ProxiedFleet) -> None:
    body = b"--x\r\n" + b"y" * (12 * MIB)
    headers = {"content-type": "multipart/form-data; boundary=x", "x-session-id": "upload"}
    answer = await fleet.ask(body, headers, path="/v1/audio/transcriptions")
    assert (answer.status, answer.sha256) == (200, hashlib.sha256(body).hexdigest())
    assert answer.endpoint == fleet.watch.decisions[-1].endpoint
    assert fleet.watch.requests[-1].body == b""


async def test_a_stream_passes_chunk_by_chunk_and_tells_of_its_first_token(fleet: ProxiedFleet) -> None:
    """Each chunk is made only after the one before has arrived: a proxy that collects would stop for ever."""
    home = (await fleet.ask(headers={"x-session-id": "stream"})).endpoint
    chunks = fleet.upstream(home).chunks
    url = fleet.envoy.url + "/stream"
    await chunks.put(b"data: 0\n\n")
    async with fleet.client.post(url, data=chat("ignored", 100), headers={"x-session-id": "stream"}) as response:
        assert response.headers["x-endpoint"] == home
        start = fleet.watch.starts[-1]
        assert (start.first_token, start.prompt_tokens, start.cached_tokens) == (True, 7, 3)
        assert start.served_endpoint == home
        for number in range(1, 6):
            assert await asyncio.wait_for(response.content.readany(), 5) == b"data: %d\n\n" % (number - 1)
            assert fleet.router.open_leases == 1
            await chunks.put(b"data: %d\n\n" % number)
        await chunks.put(None)
        assert await response.content.read() == b"data: 5\n\n"
    await fleet.all_released()


async def test_a_client_that_leaves_releases_its_lease(fleet: ProxiedFleet) -> None:
    home = (await fleet.ask(headers={"x-session-id": "leaver"})).endpoint
    upstream = fleet.upstream(home)
    await upstream.chunks.put(b"data: 0\n\n")
    async with fleet.client.post(fleet.envoy.url + "/stream", headers={"x-session-id": "leaver"}) as response:
        await response.content.readany()
        assert fleet.router.open_leases == 1
        response.close()
    await fleet.all_released()
    await upstream.chunks.put(None)


async def test_an_upgrade_passes_by_the_router(fleet: ProxiedFleet) -> None:
    decided = len(fleet.watch.decisions)
    reached = set()
    for _ in range(4):
        async with fleet.client.ws_connect(fleet.envoy.url + "/ws", headers={"x-session-id": "socket"}) as socket:
            await socket.send_str("hello")
            endpoint, _, text = (await socket.receive_str(timeout=5)).partition(" ")
            assert text == "hello"
            reached.add(endpoint)
    assert len(reached) == 1
    assert len(fleet.watch.decisions) == decided


async def test_round_robin_spreads_one_session_evenly(fleet: ProxiedFleet) -> None:
    decided = len(fleet.watch.decisions)
    headers = {"x-balance": "round_robin", "x-session-id": "s"}
    reached = collections.Counter([(await fleet.ask(chat("s"), headers)).endpoint for _ in range(40)])
    assert reached == dict.fromkeys(fleet.endpoints, 10)
    assert len(fleet.watch.decisions) == decided


async def test_a_refusal_reaches_the_client_whole(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = RouterSettings(saturation_in_flight=0, shed=True, retry_after_s=3.0)
    async with proxied_fleet(tmp_path_factory.mktemp("envoy"), size=1, router=settings) as fleet:
        (upstream,) = fleet.upstreams
        await upstream.chunks.put(b"data: 0\n\n")
        async with fleet.client.post(fleet.envoy.url + "/stream") as running:
            await running.content.readany()
            answer = await fleet.ask()
            assert answer.status == 429
            assert (answer.headers["Retry-After"], answer.headers["Content-Type"]) == ("3", "application/json")
            assert json.loads(answer.text)["error"]["code"] == "rate_limit_exceeded"
            await upstream.chunks.put(None)
        assert len(upstream.seen) == 1
        fleet.router.set_members([], 0.0)
        assert (await fleet.ask()).status == 503


async def test_response_headers_can_be_left_out(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The lease still ends with the answer, not before."""
    directory = tmp_path_factory.mktemp("envoy")
    async with proxied_fleet(directory, size=1, envoy=EnvoySettings(response_headers=False)) as fleet:
        (upstream,) = fleet.upstreams
        await upstream.chunks.put(b"data: 0\n\n")
        async with fleet.client.post(fleet.envoy.url + "/stream", data=chat("s")) as running:
            await running.content.readany()
            assert fleet.router.open_leases == 1
            await upstream.chunks.put(None)
        await fleet.all_released()
        assert not fleet.watch.starts


async def test_a_slow_client_may_leave_before_its_body_has_come(fleet: ProxiedFleet) -> None:
    decided = len(fleet.watch.decisions)
    host, port = fleet.envoy.settings.listen.split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await fleet.ask()).status == 200
    await fleet.all_released()
    assert len(fleet.watch.decisions) == decided + 1


async def test_many_at_once_are_each_sent_where_they_were_named(fleet: ProxiedFleet) -> None:
    async def one(number: int) -> None:
        body = chat(f"many-{number % 10}", padding=number * 100)
        answer = await fleet.ask(body, {"x-tenant-id": str(number)})
        assert answer.sha256 == hashlib.sha256(body).hexdigest()
        named = next(
            decision.endpoint
            for request, decision in zip(fleet.watch.requests, fleet.watch.decisions, strict=True)
            if request.headers.get("x-tenant-id") == str(number)
        )
        assert answer.endpoint == named

    await asyncio.gather(*(one(number) for number in range(200)))
    await fleet.all_released()


async def test_http2_works_alike(fleet: ProxiedFleet) -> None:
    """Prior-knowledge HTTP/2, as other proxies and gRPC clients speak it."""
    curl = await asyncio.create_subprocess_exec(
        "curl", "-s", "--http2-prior-knowledge", "-H", "x-session-id: h2", "-d", "{}", fleet.envoy.url + "/v1/x",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(curl.communicate(), 10)
    assert json.loads(output)["endpoint"] == fleet.watch.decisions[-1].endpoint
