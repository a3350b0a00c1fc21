"""Bodies sent in the ways in which other data planes send them, by a real Envoy."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest

from extproc.server import ServerSettings, Transport
from tests.support.proxied_fleet import proxied_fleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.e2e


async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(body), 50_000):
        yield body[at : at + 50_000]


@pytest.mark.parametrize(
    ("mode", "body_is_seen"),
    [("FULL_DUPLEX_STREAMED", True), ("BUFFERED_PARTIAL", True), ("STREAMED", False), ("NONE", False)],
)
@pytest.mark.parametrize("transport", list(Transport))
async def test_every_body_mode_routes_and_passes_bodies_whole(
    tmp_path: Path, mode: str, body_is_seen: bool, transport: Transport
) -> None:
    server = ServerSettings("127.0.0.1:0", transport=transport)
    async with proxied_fleet(tmp_path, body_mode=mode, server=server) as fleet:
        for size in (0, 10, 61_999, 62_000, 62_001, 1_000_000, 5_000_000):
            body = json.dumps({"session_id": "s", "prompt": "x" * size}).encode()
            for sent in (body, in_pieces(body)):
                answer = await fleet.ask(sent)
                assert (answer.status, answer.sha256) == (200, hashlib.sha256(body).hexdigest())
                assert answer.endpoint == fleet.watch.decisions[-1].endpoint
                assert fleet.watch.requests[-1].body == (body if body_is_seen else b"")
                assert fleet.watch.requests[-1].truncated is not body_is_seen
        assert (await fleet.ask(b"")).status == 200
        assert (await fleet.ask(None, method="GET", path="/v1/models")).status == 200
        await fleet.all_released()
