"""The service as one process: everything built, joined and run on one event loop."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import fields, replace
from time import monotonic
from typing import TYPE_CHECKING, Final

import structlog

from extproc import config as configuration
from extproc.admin.app import Admin
from extproc.admin.decisions import RecentDecisions
from extproc.admin.history import History
from extproc.admin.server import AdminServer
from extproc.build import COMPILED
from extproc.core.router import Router
from extproc.eds import EndpointDiscovery
from extproc.envoy_config import max_unread_bytes
from extproc.feeds.engine_metrics import EngineMetrics
from extproc.feeds.health import ReplicaHealth
from extproc.membership import Membership
from extproc.memory import calm_collector, keep_memory
from extproc.metrics import RouterMetrics
from extproc.observers import Observers
from extproc.otlp_metrics import OtlpMetrics
from extproc.picker import EndpointPicker
from extproc.server import Server
from extproc.telemetry import DecisionSpans, make_provider, make_resource
from extproc.workers.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from extproc.config import Config
    from extproc.core.replica import EngineLoad, Replica
    from extproc.picker import DecisionObserver

TICK_S: Final = 0.1
FILE_POLL_S: Final = 0.5
"""A changed file is read once it has been at rest for so long: half of one may well be valid, too."""
LIVE_SECTIONS: Final = frozenset({"membership", "features", "routing"})
"""What a reload changes under way; the others are addresses and connections, and need a restart."""

log = structlog.get_logger(__name__)


class Service:
    """Serves until SIGTERM or SIGINT; SIGHUP, or a change of the file, reloads the configuration.

    A new configuration is taken as a whole or, where it has errors, not at all. Make it inside a running event loop.
    """

    def __init__(self, config: Config, path: Path | None) -> None:
        self._config = config
        self._path = path
        self._file_read = self._file_version()
        self._stop = asyncio.Event()
        self._router = Router(config.routing)
        self._endpoints = EndpointDiscovery()
        self._membership = Membership(config.membership, self._router, self._endpoints, self._known)
        self._metrics = EngineMetrics(config.load, self._members, self._report) if config.load.enabled else None
        self._unwell_changed = asyncio.Event()
        self._health = (
            ReplicaHealth(config.health, self._members, self._unwell_changed.set) if config.health.enabled else None
        )
        self._provider = make_provider(config.telemetry)
        ratio = config.telemetry.sample_ratio
        self._spans = DecisionSpans(self._provider, config.routing.policy, ratio) if self._provider else None
        observers: list[DecisionObserver] = [each for each in (self._spans, self._health) if each is not None]
        self._picker = EndpointPicker(self._router, config.features, max_unread_bytes=max_unread_bytes(config.envoy))
        self._workers = Supervisor(config.server, self._picker, self._endpoints) if config.server.workers > 1 else None
        self._server = self._workers or Server(config.server, self._picker, self._endpoints)
        self._admin: AdminServer | None = None
        self._history: History | None = None
        self._pushed: OtlpMetrics | None = None
        metrics: RouterMetrics | None = None
        if config.admin.listen or config.telemetry.push_metrics:
            metrics = RouterMetrics(
                self._router, self._membership, self._endpoints, self._metrics, self._server.stream_errors
            )
            observers.append(metrics)
            if config.telemetry.push_metrics:
                self._pushed = OtlpMetrics(metrics.families, make_resource(config.telemetry))
        if config.admin.listen and metrics is not None:
            decisions = RecentDecisions(self._router, config.admin.recent_decisions)
            self._history = History(self._router)
            admin = Admin(self._picker, self._membership, decisions, self._history, metrics.text)
            self._admin = AdminServer(config.admin.listen, admin.app())
            observers += [decisions, self._history]
        self._picker.observer = Observers(*observers)

    async def run(self) -> None:
        """Returns after a graceful end. Raises RuntimeError where the port is taken, or what a task failed with."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        loop.add_signal_handler(signal.SIGINT, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        if self._admin is not None:
            await self._admin.start()
        address = await self._server.start()
        log.info(
            "serving",
            address=address,
            admin=self._config.admin.listen,
            policy=self._config.routing.policy.value,
            compiled=COMPILED,
        )
        calm_collector()
        keep_memory()
        tasks = [asyncio.create_task(work) for work in self._work()]
        tasks.append(asyncio.create_task(self._stop.wait()))
        try:
            # None of the others ends by itself: one that does has failed.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            log.info("leaving", open_leases=self._router.open_leases)
            await self._server.stop()
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._admin is not None:
                await self._admin.stop()
            if self._provider is not None:
                await asyncio.to_thread(self._provider.shutdown)

    def _work(self) -> list[Coroutine[None, None, object]]:
        work: list[Coroutine[None, None, object]] = [self._membership.run(), self._tick(), self._watch_file()]
        if self._metrics is not None:
            work.append(self._metrics.run())
        if self._history is not None:
            work.append(self._history.run())
        if self._pushed is not None:
            work.append(self._pushed.run())
        if self._health is not None:
            work += [self._health.run(), self._follow_health(self._health)]
        return work

    def reload(self) -> None:
        """Read the configuration again."""
        self._file_read = self._file_version()
        try:
            config = configuration.load(self._path)
        except configuration.ConfigError as error:
            log.error("new configuration refused, the old one stays", errors=error.errors)
            return
        old = self._config
        self._config = replace(old, **{name: getattr(config, name) for name in LIVE_SECTIONS})
        self._membership.settings = config.membership
        self._picker.feature_settings = config.features
        if self._workers is not None:
            self._workers.set_features(config.features)
        if config.routing != old.routing:
            self._router.replace_settings(config.routing, monotonic())
        if self._spans is not None:
            self._spans.policy = config.routing.policy
        changed = {each.name for each in fields(config) if getattr(config, each.name) != getattr(old, each.name)}
        log.info(
            "configuration reloaded",
            changed=sorted(changed & LIVE_SECTIONS),
            after_restart=sorted(changed - LIVE_SECTIONS),
        )

    # --- what runs beside the server ---

    async def _tick(self) -> None:
        while True:
            self._router.tick(monotonic())
            await asyncio.sleep(TICK_S)

    async def _follow_health(self, health: ReplicaHealth) -> None:
        while True:
            await self._unwell_changed.wait()
            self._unwell_changed.clear()
            await self._membership.set_unwell(health.unwell)

    async def _watch_file(self) -> None:
        seen = self._file_read
        while True:
            await asyncio.sleep(FILE_POLL_S)
            before, seen = seen, self._file_version()
            if before == seen != self._file_read:
                self.reload()

    def _file_version(self) -> tuple[int, int, int] | None:
        """Follows links, which is how Kubernetes replaces a mounted file."""
        try:
            status = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return (status.st_mtime_ns, status.st_size, status.st_ino) if status is not None else None

    # --- called by the parts ---

    async def _known(self) -> None:
        self._server.set_ready(True)
        log.info("ready", replicas=len(self._membership.listed))

    def _members(self) -> tuple[Replica, ...]:
        return self._membership.listed

    def _report(self, replica_id: str, engine: EngineLoad) -> None:
        self._router.set_load(replica_id, engine, monotonic())
