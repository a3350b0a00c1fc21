"""Long turns of a known session through a real Envoy: routed by their headers, their bodies never leave Envoy."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from demo.wait import until
from extproc.envoy_config import EnvoySettings
from tests.support.proxied_fleet import CHAT, Answer, ProxiedFleet, proxied_fleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.e2e

MIB = 1 << 20


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[ProxiedFleet]:
    async with proxied_fleet(tmp_path) as running:
        yield running


def chat(length: int) -> bytes:
    """A dialogue of about this length; of two lengths close to each other the longer continues the shorter."""
    turns = [{"role": "user", "content": "x" * (length - length % 10_000)}, {"role": "assistant", "content": "Go on."}]
    messages = [*turns, {"role": "user", "content": "x" * (length % 10_000)}]
    return json.dumps({"model": "m", "stream": True, "messages": messages}).encode()


async def turn(fleet: ProxiedFleet, length: int, headers: dict[str, str] | None = None) -> tuple[Answer, bool]:
    """One request of the session; the answer, and whether the router saw the body."""
    body = chat(length)
    answer = await fleet.ask(body, {"x-session-id": "s", **(headers or {})})
    if answer.status == 200:
        assert answer.sha256 == hashlib.sha256(body).hexdigest()
        seen = fleet.upstream(answer.endpoint).seen[-1]
        assert seen.headers["content-length"] == str(len(body))
    return answer, fleet.watch.requests[-1].body == body


@pytest.mark.parametrize("length", [70_000, MIB, 7 * MIB])
async def test_the_session_stays_where_it_is(fleet: ProxiedFleet, length: int) -> None:
    turns = [await turn(fleet, length + 100 * number) for number in range(8)]
    assert [read for _, read in turns] == [True] + [False] * 7
    assert {answer.endpoint for answer, _ in turns} == {decision.endpoint for decision in fleet.watch.decisions}
    assert len({answer.endpoint for answer, _ in turns}) == 1
    assert {start.served_endpoint for start in fleet.watch.starts} == {turns[0][0].endpoint}
    assert len(fleet.watch.starts) == 8
    await fleet.all_released()
    assert fleet.watch.finished_count == 8


async def test_another_tenant_s_session_of_that_name_is_another(fleet: ProxiedFleet) -> None:
    for key in ("a", "b"):
        read = [(await turn(fleet, 100_000, {"authorization": key}))[1] for _ in range(2)]
        assert read == [True, False]
    keys = {request.headers["authorization"] for request in fleet.watch.requests if not request.body}
    assert keys == {"a", "b"}


async def test_a_chunked_body_is_read_since_its_length_is_not_told(fleet: ProxiedFleet) -> None:
    async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(body), 50_000):
            yield body[at : at + 50_000]

    for _ in range(4):
        await fleet.ask(in_pieces(chat(100_000)), {"x-session-id": "s"})
        assert fleet.watch.requests[-1].body == chat(100_000)


@pytest.mark.parametrize("failure", ["503", "refused", "dies"])
@pytest.mark.parametrize("length", [MIB, 4 * MIB], ids=["1 MiB", "4 MiB"])
async def test_a_retry_goes_to_another_replica(fleet: ProxiedFleet, failure: str, length: int) -> None:
    for _ in range(2):
        answer, read = await turn(fleet, length)
    assert not read
    home = answer.endpoint
    if failure in {"503", "dies"}:
        fleet.upstream(home).status = 503 if failure == "503" else 0
    else:
        await fleet.upstream(home).stop()
    for _ in range(5):
        answer, read = await turn(fleet, length)
        assert (answer.status, read) == (200, False)
        assert answer.endpoint != home
        assert fleet.watch.decisions[-1].endpoint == home
        assert fleet.watch.starts[-1].served_endpoint == answer.endpoint
    await fleet.all_released()


async def test_a_retry_sends_what_a_slow_client_had_sent_before(fleet: ProxiedFleet) -> None:
    """The first replica says no while half of the body is still to come."""
    for _ in range(2):
        answer, read = await turn(fleet, MIB)
    assert not read
    home = fleet.upstream(answer.endpoint)
    await home.stop()
    body, decided = chat(MIB), len(fleet.watch.decisions)

    async def in_halves() -> AsyncIterator[bytes]:
        yield body[: len(body) // 2]

        async def routed() -> bool:
            return len(fleet.watch.decisions) > decided

        await until(routed, "it is routed by its headers")
        yield body[len(body) // 2 :]

    headers = {"x-session-id": "s", "content-length": str(len(body))}
    answer = await fleet.ask(in_halves(), headers)
    assert (answer.status, answer.sha256) == (200, hashlib.sha256(body).hexdigest())
    assert fleet.watch.requests[-1].body == b""
    assert fleet.watch.starts[-1].served_endpoint == answer.endpoint != home.endpoint


async def test_a_body_over_the_limit_is_413_all_the_same(tmp_path: Path) -> None:
    async with proxied_fleet(tmp_path, envoy=EnvoySettings(max_body_bytes=1_600_000)) as fleet:
        assert [(await turn(fleet, 1_500_000))[1] for _ in range(2)] == [True, False]
        answered = [len(upstream.seen) for upstream in fleet.upstreams]
        answer, read = await turn(fleet, 1_900_000)
        assert (answer.status, read) == (413, False)
        assert [len(upstream.seen) for upstream in fleet.upstreams] == answered


async def test_the_lease_lasts_until_the_answer_ends(fleet: ProxiedFleet) -> None:
    path = "/stream" + CHAT
    for number in range(2):
        for upstream in fleet.upstreams:
            await upstream.chunks.put(b"data: 0\n\n")
        body = chat(100_000)
        async with fleet.client.post(fleet.envoy.url + path, data=body, headers={"x-session-id": "s"}) as response:
            assert await response.content.readany() == b"data: 0\n\n"
            assert (fleet.watch.requests[-1].body == b"") is (number >= 1)
            assert (fleet.watch.starts[-1].first_token, fleet.watch.starts[-1].prompt_tokens) == (True, 7)
            (load,) = [each for each in fleet.router.loads.values() if each.in_flight]
            assert load.ledger_tokens == 0
            assert fleet.router.open_leases == 1
            await fleet.upstream(response.headers["x-endpoint"]).chunks.put(None)
            await response.read()
        await fleet.all_released()
        for upstream in fleet.upstreams:
            while not upstream.chunks.empty():
                upstream.chunks.get_nowait()


async def test_a_client_may_leave_before_its_body_has_come(fleet: ProxiedFleet) -> None:
    for _ in range(2):
        await turn(fleet, 100_000)
    host, port = fleet.envoy.settings.listen.split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-session-id: s\r\ncontent-length: 110000\r\n\r\n"
    decided = len(fleet.watch.decisions)
    writer.write(head.encode() + b"{")
    await writer.drain()

    async def routed() -> bool:
        return len(fleet.watch.decisions) > decided

    await until(routed, "it is routed by its headers")
    assert fleet.router.open_leases == 1
    writer.close()
    await writer.wait_closed()
    await fleet.all_released()


async def test_without_response_headers_all_bodies_are_read(tmp_path: Path) -> None:
    async with proxied_fleet(tmp_path, envoy=EnvoySettings(response_headers=False)) as fleet:
        assert [(await turn(fleet, 100_000))[1] for _ in range(4)] == [True] * 4
