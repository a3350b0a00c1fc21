"""Membership: from the feed to Envoy and to the router, in an order in which neither is ahead of the other.

    a replica comes:   Envoy learns of it, confirms, then the router may name it
    a replica goes:    the router stops naming it, then Envoy forgets it

so a decision never names an endpoint that a connected Envoy does not know. An Envoy that does not confirm in time
does not hold up the others: an unknown endpoint costs it a fallback, not a failure.

The last replica never goes. A feed that names nobody is mistaken, or the fleet is being replaced: Ray Serve names no
replica for a second or two while all of them are redeployed, and the old ones still answer. They stay in force until
new ones are there; should they really be gone, a refused connection says so as well as we could.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from extproc.feeds.feed import FeedError, MembershipFeed
from extproc.feeds.models import WithModels
from extproc.feeds.ray_serve import RayServeFeed
from extproc.feeds.static import StaticFeed, StaticReplica
from extproc.feeds.watched_file import FileFeed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from extproc.core.replica import Replica
    from extproc.core.router import Router
    from extproc.eds import EndpointDiscovery

log = structlog.get_logger(__name__)


class Source(StrEnum):
    """Where the membership comes from."""

    STATIC = "static"
    FILE = "file"
    RAY_SERVE = "ray_serve"


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    """The fleet.

    source: "static" (`replicas`), "file" (`file`), "ray_serve" (`ray_serve_url`).
    poll_s: between two looks; Ray Serve takes 0.4-0.8 s to notice a killed replica, so faster would gain little.
    ask_models: ask each replica at /v1/models what it serves, where the source does not say.
    models, weights: by Ray Serve application.
    confirm_s: how long Envoys are given to confirm a new endpoint before the router names it.
    """

    source: Source = Source.STATIC
    replicas: tuple[StaticReplica, ...] = ()
    file: str = ""
    ray_serve_url: str = "http://127.0.0.1:8265"
    poll_s: float = 0.5
    ask_models: bool = True
    models: dict[str, tuple[str, ...]] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    confirm_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.poll_s > 0:
            raise ValueError("poll_s must be above 0")
        if self.source is Source.FILE and not self.file:
            raise ValueError('file: name the file, since source = "file"')
        if any(not weight > 0 for weight in self.weights.values()):
            raise ValueError("weights must be above 0")

    def feed(self) -> MembershipFeed:
        feed: MembershipFeed
        match self.source:
            case Source.STATIC:
                feed = StaticFeed(self.replicas)
            case Source.FILE:
                feed = FileFeed(self.file)
            case Source.RAY_SERVE:
                feed = RayServeFeed(self.ray_serve_url, self.models, self.weights)
        return WithModels(feed) if self.ask_models else feed


class Membership:
    """Keeps router and Envoys up to date with a feed. `known` is called once the fleet is known."""

    def __init__(
        self,
        settings: MembershipSettings,
        router: Router,
        endpoints: EndpointDiscovery,
        known: Callable[[bool], Awaitable[None]],
    ) -> None:
        self.settings = settings
        self.failures = 0
        self.last_read_s: float | None = None
        self._router = router
        self._endpoints = endpoints
        self._known = known

    async def run(self) -> None:
        """Follow the feed until cancelled. A change of `settings` is followed at the next look."""
        settings, feed = self.settings, self.settings.feed()
        try:
            while True:
                if settings != self.settings:
                    await feed.close()
                    settings, feed = self.settings, self.settings.feed()
                await self._look(feed)
                await asyncio.sleep(settings.poll_s)
        finally:
            await feed.close()

    async def _look(self, feed: MembershipFeed) -> None:
        try:
            replicas = await feed.read()
        except FeedError as error:
            self.failures += 1
            self._mark_stale(str(error))
            return
        self.last_read_s = monotonic()
        if not replicas and self._router.loads:
            self._mark_stale("it names no replica")
            return
        if self._router.membership_stale:
            self._router.membership_stale = False
            log.info("membership feed found again")
        await self.apply(replicas)

    def _mark_stale(self, why: str) -> None:
        if not self._router.membership_stale:
            self._router.membership_stale = True
            log.warning("membership feed lost, the last known members stay", why=why)

    async def apply(self, replicas: Sequence[Replica]) -> None:
        """Make these the members."""
        router = self._router
        before = {replica_id: load.replica for replica_id, load in router.loads.items()}
        after = {replica.id: replica for replica in replicas}
        if before == after and self._endpoints.version:
            return
        # Those that stay, as they are now (draining, say); the new ones only when Envoy has them.
        stay = [after[id_] for id_, was in before.items() if id_ in after and after[id_].endpoint == was.endpoint]
        if stay:
            router.set_members(stay, monotonic())
        version = await self._endpoints.publish(replicas)
        confirmed = await self._endpoints.acknowledged(version, self.settings.confirm_s)
        router.set_members(replicas, monotonic())
        log.info(
            "membership changed",
            version=router.membership_version,
            replicas=len(after),
            joined=sorted(after.keys() - before.keys()),
            left=sorted(before.keys() - after.keys()),
            draining=sorted(replica.id for replica in replicas if replica.draining),
            confirmed=confirmed,
        )
        await self._known(True)
