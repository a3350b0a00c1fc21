"""Membership: from the feed to Envoy and to the router, in an order in which neither is ahead of the other.

    a replica comes:   Envoy learns of it, confirms, then the router may name it
    a replica goes:    the router stops naming it, then Envoy forgets it

so a decision never names an endpoint that a connected Envoy does not know. Where all go at once, they go last: when the
new ones are in force. An Envoy that does not confirm in time does not hold up the others: an unknown endpoint costs it
a fallback, not a failure.

The last replica never goes. A feed that names nobody is mistaken, or the fleet is being replaced: Ray Serve names no
replica for a second or two while all of them are redeployed, and the old ones still answer. They stay in force until
new ones are there; should they really be gone, a refused connection says so as well as we could. A service that has
just started waits for the first replica likewise, and leaves its Envoys what an earlier one told them.

A replica that is unwell stays a member but counts as draining: it is chosen only where there is no other.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from enum import StrEnum
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from extproc.address import split_address
from extproc.feeds.addresses import WithAddresses
from extproc.feeds.dns_records import DnsFeed, check_name
from extproc.feeds.feed import FeedError, MembershipFeed
from extproc.feeds.models import WithModels
from extproc.feeds.ray_serve import RayServeFeed
from extproc.feeds.static import StaticFeed, StaticReplica, replicas_of
from extproc.feeds.watched_file import FileFeed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from extproc.core.replica import Replica
    from extproc.core.router import Router
    from extproc.eds import EndpointDiscovery

log = structlog.get_logger(__name__)


class Source(StrEnum):
    """Where the membership comes from."""

    STATIC = "static"
    FILE = "file"
    DNS = "dns"
    RAY_SERVE = "ray_serve"


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    """The fleet.

    source: "ray_serve" (`ray_serve_url`), "static" (`replicas`), "file" (`file`) or "dns" (`dns`).
    ray_serve_url: of the Ray dashboard; 8265 is its port unless told otherwise.
    replicas: tables of endpoint, id, weight and models. file: TOML or JSON with the same list.
    dns: "host:port" for all addresses of a host, "_service._protocol.host" for SRV records. dns_server: "ip:port";
        empty: the system's.
    poll_s: between two looks; Ray Serve takes 0.4-0.8 s to notice a killed replica, so faster would gain little.
    ask_models: ask each replica at /v1/models what it serves, where the source does not say.
    models, weights: by Ray Serve application.
    confirm_s: how long Envoys are given to confirm a new endpoint before the router names it; on one host they take
        a few milliseconds.
    """

    source: Source = Source.RAY_SERVE
    ray_serve_url: str = "http://127.0.0.1:8265"
    replicas: tuple[StaticReplica, ...] = ()
    file: str = ""
    dns: str = ""
    dns_server: str = ""
    poll_s: float = 0.5
    ask_models: bool = True
    models: dict[str, tuple[str, ...]] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    confirm_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.poll_s > 0:
            raise ValueError("poll_s must be above 0")
        if not self.confirm_s >= 0:
            raise ValueError("confirm_s must be at least 0")
        if any(not 0 < weight < float("inf") for weight in self.weights.values()):
            raise ValueError("weights must be above 0")
        if not self.ray_serve_url.startswith(("http://", "https://")):
            raise ValueError(f"ray_serve_url must begin with http:// or https://, got {self.ray_serve_url!r}")
        for source, key, value in (
            (Source.STATIC, "replicas", self.replicas),
            (Source.FILE, "file", self.file),
            (Source.DNS, "dns", self.dns),
        ):
            if source is self.source and not value:
                raise ValueError(f'source = "{source}" needs {key}')
            if value and source is not self.source:
                raise ValueError(f'{key} needs source = "{source}", but source is "{self.source}"')
        replicas_of(self.replicas)
        if self.dns:
            check_name(self.dns)
        if self.dns_server:
            split_address(self.dns_server)

    def feed(self) -> MembershipFeed:
        feed: MembershipFeed
        match self.source:
            case Source.STATIC:
                feed = StaticFeed(self.replicas)
            case Source.FILE:
                feed = FileFeed(self.file)
            case Source.DNS:
                feed = DnsFeed(self.dns, self.dns_server)
            case Source.RAY_SERVE:
                feed = RayServeFeed(self.ray_serve_url, self.models, self.weights)
        feed = WithAddresses(feed)
        return WithModels(feed) if self.ask_models else feed


class Membership:
    """Keeps router and Envoys up to date with a feed.

    listed: what the feed last said. settings: a change is followed at the next look.
    failures: failed looks so far. last_read_s: monotonic time of the last look that succeeded.
    known: called once the fleet is known.
    """

    def __init__(
        self,
        settings: MembershipSettings,
        router: Router,
        endpoints: EndpointDiscovery,
        known: Callable[[], Awaitable[None]],
    ) -> None:
        self.settings = settings
        self.listed: tuple[Replica, ...] = ()
        self.failures = 0
        self.last_read_s: float | None = None
        self._router = router
        self._endpoints = endpoints
        self._known = known
        self._unwell: frozenset[str] = frozenset()
        self._one_at_a_time = asyncio.Lock()

    async def run(self) -> None:
        """Follow the feed until cancelled."""
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

    async def set_unwell(self, replica_ids: frozenset[str]) -> None:
        """These are chosen only where there is no other."""
        self._unwell = replica_ids
        if self.last_read_s is not None:
            await self._apply()

    async def _look(self, feed: MembershipFeed) -> None:
        try:
            replicas = await feed.read()
        except FeedError as error:
            self._miss(str(error))
            return
        if not replicas:
            self._miss("it names no replica")
            return
        first = self.last_read_s is None
        self.listed = tuple(replicas)
        self.last_read_s = monotonic()
        if self._router.membership_stale:
            self._router.membership_stale = False
            log.info("membership feed found again")
        await self._apply()
        if first:
            await self._known()

    def _miss(self, why: str) -> None:
        self.failures += 1
        if not self._router.membership_stale:
            self._router.membership_stale = True
            log.warning("membership feed lost, the last known members stay", why=why)

    async def _apply(self) -> None:
        """Make what is listed the membership."""
        async with self._one_at_a_time:
            router = self._router
            before = {replica_id: load.replica for replica_id, load in router.loads.items()}
            replicas = [replace(r, draining=r.draining or r.id in self._unwell) for r in self.listed]
            after = {replica.id: replica for replica in replicas}
            if before == after and self._endpoints.version:
                return
            stay = [after[id_] for id_, was in before.items() if id_ in after and after[id_].endpoint == was.endpoint]
            if stay:
                router.set_members(stay, monotonic())
            addresses = {replica.endpoint for replica in replicas}
            last = [] if stay else [was for was in before.values() if was.endpoint not in addresses]
            version = await self._endpoints.publish([*replicas, *last])
            confirmed = await self._endpoints.acknowledged(version, self.settings.confirm_s)
            router.set_members(replicas, monotonic())
            if last:
                await self._endpoints.publish(replicas)
            log.info(
                "membership changed",
                version=router.membership_version,
                replicas=len(after),
                joined=sorted(after.keys() - before.keys()),
                left=sorted(before.keys() - after.keys()),
                draining=sorted(replica.id for replica in replicas if replica.draining),
                confirmed=confirmed,
            )
