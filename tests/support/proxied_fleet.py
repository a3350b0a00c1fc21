"""A fleet of small upstreams behind a real Envoy, with the router in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

import aiohttp

from demo.wait import until
from extproc.core.replica import Replica
from extproc.core.router import Router, RouterSettings
from extproc.eds import EndpointDiscovery
from extproc.envoy_config import EnvoySettings, max_unread_bytes
from extproc.picker import EndpointPicker
from extproc.server import Server, ServerSettings
from tests.support.envoy import Envoy
from tests.support.upstreams import Upstream
from tests.support.watch import Watch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping
    from pathlib import Path

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Answer:
    """What the client got. endpoint: which upstream says it answered; empty where Envoy did."""

    status: int
    endpoint: str
    sha256: str
    headers: Mapping[str, str]
    text: str


@dataclass
class ProxiedFleet:
    """Everything that one test looks at."""

    envoy: Envoy
    upstreams: list[Upstream]
    router: Router
    server: Server
    discovery: EndpointDiscovery
    client: aiohttp.ClientSession
    watch: Watch

    def upstream(self, endpoint: str) -> Upstream:
        return next(each for each in self.upstreams if each.endpoint == endpoint)

    @property
    def endpoints(self) -> list[str]:
        return [upstream.endpoint for upstream in self.upstreams]

    async def announce(self, replicas: Iterable[Replica]) -> bool:
        """Tell Envoy and the router about the fleet; whether Envoy has accepted it."""
        fleet = list(replicas)
        version = await self.discovery.publish(fleet)
        accepted = await self.discovery.acknowledged(version, timeout_s=5)
        self.router.set_members(fleet, monotonic())
        return accepted

    async def all_released(self) -> None:
        async def released() -> bool:
            return self.router.open_leases == 0

        await until(released, "every lease is released")

    async def silence_router(self) -> None:
        """Have Envoy leave the router alone."""
        self.server.set_ready(False)

        async def left_alone() -> bool:
            return not await asyncio.to_thread(self.envoy.sees_router)

        await until(left_alone, "envoy leaves the router alone")

    async def ask(
        self,
        body: bytes | AsyncIterator[bytes] | None = b"{}",
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
        path: str = CHAT,
    ) -> Answer:
        return await ask(self.client, self.envoy.url, body, headers, method, path)


async def ask(
    client: aiohttp.ClientSession,
    url: str,
    body: bytes | AsyncIterator[bytes] | None = b"{}",
    headers: Mapping[str, str] | None = None,
    method: str = "POST",
    path: str = CHAT,
) -> Answer:
    """One request through Envoy."""
    given = {"content-type": "application/json", **(headers or {})}
    async with client.request(method, url + path, data=body, headers=given) as response:
        text = await response.text()
        said: dict[str, Any] = await response.json() if text.startswith('{"endpoint"') else {}
        return Answer(response.status, said.get("endpoint", ""), said.get("sha256", ""), dict(response.headers), text)


def replicas_of(endpoints: Iterable[str]) -> list[Replica]:
    return [Replica(f"replica-{endpoint}", endpoint) for endpoint in endpoints]


@contextlib.asynccontextmanager
async def proxied_fleet(
    directory: Path,
    size: int = 4,
    envoy: EnvoySettings | None = None,
    router: RouterSettings | None = None,
    body_mode: str = "BUFFERED",
    sample_ratio: float = 1.0,
    server: ServerSettings | None = None,
) -> AsyncIterator[ProxiedFleet]:
    """Start it and wait until Envoy knows the fleet; end all of it."""
    async with contextlib.AsyncExitStack() as stack:
        upstreams = [Upstream() for _ in range(size)]
        for upstream in upstreams:
            await upstream.start()
            stack.push_async_callback(upstream.stop)
        core, discovery, watch = Router(router), EndpointDiscovery(), Watch()
        settings = replace(server or ServerSettings(listen="127.0.0.1:0"), notice_s=0.0, drain_s=0.2)
        picker = EndpointPicker(core, observer=watch, max_unread_bytes=max_unread_bytes(envoy or EnvoySettings()))
        serving = Server(settings, picker, discovery)
        address = await serving.start()
        stack.push_async_callback(serving.stop)
        fleet = replicas_of(upstream.endpoint for upstream in upstreams)
        await discovery.publish(fleet)
        core.set_members(fleet, monotonic())
        serving.set_ready(True)
        proxy = await asyncio.to_thread(
            Envoy, directory, address, envoy, body_mode=body_mode, sample_ratio=sample_ratio
        )
        stack.callback(proxy.stop)
        await asyncio.to_thread(proxy.wait_for_router, [replica.endpoint for replica in fleet])
        client = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30), auto_decompress=False)
        )
        yield ProxiedFleet(proxy, upstreams, core, serving, discovery, client, watch)
