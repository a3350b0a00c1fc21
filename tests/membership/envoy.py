"""An Envoy as endpoint discovery sees it, without its transport: a subscriber that answers when the test says so."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

from envoy.config.core.v3.health_check_pb2 import DRAINING
from envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from extproc.eds import EndpointDiscovery


class Envoy:
    """An async context manager.

    endpoints: "ip:port" -> whether it is draining, by the last list that came.
    """

    def __init__(self, discovery: EndpointDiscovery) -> None:
        self.endpoints: dict[str, bool] = {}
        self._discovery = discovery
        self._requests: asyncio.Queue[DiscoveryRequest] = asyncio.Queue()
        self._news: asyncio.Queue[DiscoveryResponse] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._requests.put_nowait(DiscoveryRequest(resource_names=["fleet"]))
        self._stream = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stream.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._stream

    async def _follow(self) -> None:
        async with contextlib.aclosing(self._discovery.serve(self._sent())) as responses:
            async for response in responses:
                self._news.put_nowait(DiscoveryResponse.FromString(response))

    async def _sent(self) -> AsyncIterator[bytes]:
        while True:
            yield (await self._requests.get()).SerializeToString()

    async def told(self) -> set[str]:
        """Wait for the next list; its endpoints. It is not answered yet."""
        self._last = await asyncio.wait_for(self._news.get(), 10)
        (resource,) = self._last.resources
        (locality,) = ClusterLoadAssignment.FromString(resource.value).endpoints
        self.endpoints = {}
        for each in locality.lb_endpoints:
            address = each.endpoint.address.socket_address
            self.endpoints[f"{address.address}:{address.port_value}"] = each.health_status == DRAINING
        return set(self.endpoints)

    @property
    def is_told_nothing_new(self) -> bool:
        return self._news.empty()

    def accept(self) -> None:
        self._answer()

    def refuse(self) -> None:
        self._answer(error="no")

    def _answer(self, error: str = "") -> None:
        request = DiscoveryRequest(resource_names=["fleet"], response_nonce=self._last.nonce)
        if error:
            request.error_detail.message = error
        self._requests.put_nowait(request)
