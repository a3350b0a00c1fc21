"""The service as one process: everything built, joined and run on one event loop."""

from __future__ import annotations

import asyncio
import signal
from time import monotonic
from typing import TYPE_CHECKING, Final

import structlog

from extproc import config as configuration
from extproc.core.router import Router
from extproc.eds import EndpointDiscovery
from extproc.feeds.engine_metrics import EngineMetrics
from extproc.membership import Membership
from extproc.picker import EndpointPicker, NoObserver
from extproc.server import Server
from extproc.telemetry import DecisionSpans, make_provider

if TYPE_CHECKING:
    from pathlib import Path

    from extproc.config import Config
    from extproc.core.replica import EngineLoad, Replica

TICK_S: Final = 0.1
FILE_POLL_S: Final = 1.0

log = structlog.get_logger(__name__)


class Service:
    """Serves until SIGTERM or SIGINT; SIGHUP, or a change of the file, reloads the configuration.

    A new configuration is taken as a whole or, where it has errors, not at all. Addresses, telemetry and load
    polling keep their settings until a restart; membership, features and routing change under way.
    """

    def __init__(self, config: Config, path: Path | None) -> None:
        self._config = config
        self._path = path
        self._stop = asyncio.Event()
        self._lost_metrics: set[str] = set()
        self._router = Router(config.routing)
        self._endpoints = EndpointDiscovery()
        self._provider = make_provider(config.telemetry)
        self._spans = DecisionSpans(self._provider, config.routing.policy) if self._provider else None
        self._picker = EndpointPicker(self._router, config.features, self._spans or NoObserver())
        self._server = Server(config.server, self._picker, self._endpoints)
        self._membership = Membership(config.membership, self._router, self._endpoints, self._server.set_ready)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        loop.add_signal_handler(signal.SIGINT, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        address = await self._server.start()
        log.info("serving", address=address, policy=self._config.routing.policy.value)
        tasks = [asyncio.create_task(self._guard(run())) for run in (self._membership.run, self._tick, self._watch)]
        if self._config.load.enabled:
            metrics = EngineMetrics(self._config.load, self._members, self._report, self._lost)
            tasks.append(asyncio.create_task(self._guard(metrics.run())))
        try:
            await self._stop.wait()
            log.info("leaving", open_streams=self._router.open_leases)
        finally:
            await self._server.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._provider is not None:
                await asyncio.to_thread(self._provider.shutdown)

    def reload(self) -> None:
        """Read the configuration again."""
        try:
            config = configuration.load(self._path)
        except configuration.ConfigError as error:
            log.error("new configuration refused, the old one stays", errors=error.errors)
            return
        if config == self._config:
            return
        self._config = config
        self._membership.settings = config.membership
        self._picker.feature_settings = config.features
        self._router.replace_settings(config.routing, monotonic())
        if self._spans is not None:
            self._spans.policy = config.routing.policy
        log.info("configuration reloaded")

    async def _guard(self, task: asyncio.Future[None] | object) -> None:
        """A background task that fails takes the service down with a message rather than silently stop."""
        try:
            await task  # type: ignore[misc]
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("internal error, leaving")
            self._stop.set()

    async def _tick(self) -> None:
        while True:
            self._router.tick(monotonic())
            await asyncio.sleep(TICK_S)

    async def _watch(self) -> None:
        seen = self._modified_ns()
        while True:
            await asyncio.sleep(FILE_POLL_S)
            if (now := self._modified_ns()) != seen:
                seen = now
                self.reload()

    def _modified_ns(self) -> int | None:
        try:
            return self._path.stat().st_mtime_ns if self._path is not None else None
        except OSError:
            return None

    def _members(self) -> list[Replica]:
        return [load.replica for load in self._router.loads.values()]

    def _report(self, replica_id: str, engine: EngineLoad) -> None:
        self._router.set_load(replica_id, engine, monotonic())
        if replica_id in self._lost_metrics:
            self._lost_metrics.discard(replica_id)
            log.info("engine metrics found again", replica=replica_id)

    def _lost(self, replica_id: str, error: str) -> None:
        if replica_id not in self._lost_metrics:
            self._lost_metrics.add(replica_id)
            log.warning("engine metrics lost", replica=replica_id, error=error)
