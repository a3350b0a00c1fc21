"""The admin port: health and metrics over plain HTTP, for people and Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from extproc.address import split_address

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """The admin port.

    listen: "host:port"; "": none. It shows replicas and load to whoever can reach it, so keep it on loopback or within
        the cluster.
    """

    listen: str = ""

    def __post_init__(self) -> None:
        if self.listen:
            split_address(self.listen)


class AdminServer:
    """GET /healthz: the process runs. /readyz: the fleet is known, else 503. /metrics: see extproc.metrics."""

    def __init__(self, settings: AdminSettings, metrics: Callable[[], bytes], is_ready: Callable[[], bool]) -> None:
        self._settings = settings
        self._metrics = metrics
        self._is_ready = is_ready
        app = web.Application()
        app.add_routes(
            [web.get("/healthz", self._healthz), web.get("/readyz", self._readyz), web.get("/metrics", self._page)]
        )
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> None:
        """Raises OSError where the port can't be had."""
        host, port = split_address(self._settings.listen)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        return web.Response(text="ready\n") if self._is_ready() else web.Response(status=503, text="no fleet yet\n")

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), content_type="text/plain", charset="utf-8")
