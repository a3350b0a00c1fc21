"""EDS: hands the fleet's endpoints to every connected Envoy and knows which version each of them has accepted.

State of the world over `StreamEndpoints` (envoyproxy.io/docs/envoy/latest/api-docs/xds_protocol): one resource,
the whole list at every change. A fleet of 1,024 is about 60 KB, sent only when the membership changes, so the
incremental variant would buy nothing.
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from envoy.config.core.v3.health_check_pb2 import DRAINING, HEALTHY
from envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse
from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from extproc.core.replica import Replica

FLEET: Final = "fleet"
"""The resource's name, the same as the cluster's in envoy/bootstrap.yaml."""
TYPE_URL: Final = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"

WEIGHT_STEPS: Final = 100
"""Envoy's weights are whole numbers: 1.0 becomes 100, so that a replica may be 1% faster than another."""

log = logging.getLogger(__name__)


class DiscoveryStreams(Protocol):
    """Whoever tells Envoys the endpoints: this process, or one that it asks (extproc.workers)."""

    def serve(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """One `StreamEndpoints` call: serialized DiscoveryRequests in, DiscoveryResponses out."""

    async def close(self) -> None:
        """End all streams, which would not end by themselves. Envoys keep what they were told."""


@dataclass(eq=False, slots=True)
class Subscriber:
    """One open EDS stream. node: Envoy's own id. sent, accepted, refused: the newest version of each kind.

    ended: it says no more.
    """

    node: str = ""
    sent: int = 0
    accepted: int = 0
    refused: int = 0
    ended: bool = False


@dataclass(slots=True)
class EndpointDiscovery:
    """What Envoys are to know. Lives on one event loop.

    version: of the current list; 0 until the first `publish`, and until then nobody is told anything, so that
    an Envoy that outlived a router keeps what it has.
    """

    version: int = 0
    _assignment: bytes = b""
    _subscribers: set[Subscriber] = field(default_factory=set)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _closed: bool = False

    @property
    def subscribers(self) -> frozenset[Subscriber]:
        return frozenset(self._subscribers)

    async def publish(self, replicas: Iterable[Replica]) -> int:
        """Replace the endpoints; returns the version to wait for. The same list twice is one version."""
        assignment = _assignment(replicas)
        async with self._changed:
            if assignment != self._assignment or self.version == 0:
                self._assignment = assignment
                self.version += 1
                self._changed.notify_all()
            return self.version

    async def acknowledged(self, version: int, timeout_s: float) -> bool:
        """Wait until every connected Envoy has accepted `version` or a later one.

        True at once where none is connected. False where one refused it, or the time was up.
        """
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: all(self._answered(s, version) for s in self._subscribers))
            except TimeoutError:
                return False
            return all(subscriber.accepted >= version for subscriber in self._subscribers)

    @staticmethod
    def _answered(subscriber: Subscriber, version: int) -> bool:
        return max(subscriber.accepted, subscriber.refused) >= version

    async def close(self) -> None:
        """End all streams, which would not end by themselves. Envoys keep what they were told."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def serve(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """One `StreamEndpoints` call: serialized DiscoveryRequests in, DiscoveryResponses out."""
        subscriber = Subscriber()
        reader = asyncio.create_task(self._listen(subscriber, requests))
        try:
            while await self._has_news(subscriber):
                subscriber.sent = self.version
                yield _response(self.version, self._assignment)
        finally:
            reader.cancel()
            async with self._changed:
                self._subscribers.discard(subscriber)
                self._changed.notify_all()

    async def _has_news(self, subscriber: Subscriber) -> bool:
        """Wait for a version that the subscriber has not been sent; False when its stream has ended."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._over(subscriber) or (subscriber in self._subscribers and subscriber.sent < self.version)
            )
        return not self._over(subscriber)

    def _over(self, subscriber: Subscriber) -> bool:
        return self._closed or subscriber.ended

    async def _listen(self, subscriber: Subscriber, requests: AsyncIterator[bytes]) -> None:
        """Follow what one Envoy subscribes to, accepts and refuses."""
        try:
            async for message in requests:
                self._note(subscriber, DiscoveryRequest.FromString(message))
                async with self._changed:
                    self._changed.notify_all()
        except DecodeError:
            log.error("what is no DiscoveryRequest has ended its stream")
        finally:
            async with self._changed:
                subscriber.ended = True
                self._changed.notify_all()

    def _note(self, subscriber: Subscriber, request: DiscoveryRequest) -> None:
        subscriber.node = request.node.id or subscriber.node  # Envoy names itself in the first message only
        if FLEET in request.resource_names or not request.resource_names:
            self._subscribers.add(subscriber)
        nonce = int(request.response_nonce) if re.fullmatch(r"[0-9]{1,18}", request.response_nonce) else 0
        if not nonce:
            return
        if request.HasField("error_detail"):
            subscriber.refused = nonce
            log.error("envoy %s refused endpoints %d: %s", subscriber.node, nonce, request.error_detail.message)
        else:
            subscriber.accepted = nonce


def _assignment(replicas: Iterable[Replica]) -> bytes:
    assignment = ClusterLoadAssignment(cluster_name=FLEET)
    locality = assignment.endpoints.add()
    for replica in sorted(replicas, key=lambda replica: replica.id):
        host, _, port = replica.endpoint.rpartition(":")
        endpoint = locality.lb_endpoints.add(health_status=DRAINING if replica.draining else HEALTHY)
        address = endpoint.endpoint.address.socket_address
        address.address, address.port_value = host.strip("[]"), int(port)
        endpoint.load_balancing_weight.value = max(1, round(replica.weight * WEIGHT_STEPS))
        # The fallback's ring is seeded by the replica, not by a port that another one may be given later.
        endpoint.metadata.filter_metadata["envoy.lb"].update({"hash_key": replica.id})
    serialized: bytes = assignment.SerializeToString(deterministic=True)
    return serialized


def _response(version: int, assignment: bytes) -> bytes:
    # One resource and one writer per stream: the version can be the nonce.
    response = DiscoveryResponse(version_info=str(version), nonce=str(version), type_url=TYPE_URL)
    response.resources.add(type_url=TYPE_URL, value=assignment)
    serialized: bytes = response.SerializeToString()
    return serialized
