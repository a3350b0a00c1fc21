"""Endpoint discovery by way of workers: the streams are the parent's, the bytes pass through."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse

from demo.wait import until
from extproc.core.replica import Replica

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.workers.house import House, Worker

FLEET = [Replica(f"replica-{number}", f"10.0.0.{number}:8000") for number in range(1, 7)]


async def envoy(*messages: bytes) -> AsyncIterator[bytes]:
    """One Envoy's discovery stream, open until cancelled."""
    for message in messages:
        yield message
    await asyncio.Event().wait()


async def subscribers(house: House, count: int) -> None:
    async def reached() -> bool:
        return len(house.endpoints.subscribers) == count

    await until(reached, f"{count} Envoys follow")


async def test_discovery_streams_are_the_parents(house: House) -> None:
    worker: Worker = house.worker()
    said = DiscoveryRequest(resource_names=["fleet"])
    said.node.id = "envoy-1"
    first = worker.discovery.serve(envoy(said.SerializeToString()))
    second = worker.discovery.serve(envoy(said.SerializeToString()))
    assert house.run(house.endpoints.publish(FLEET)) == 1
    responses = [DiscoveryResponse.FromString(await anext(stream)) for stream in (first, second)]
    assert [each.version_info for each in responses] == ["1", "1"]
    await subscribers(house, 2)
    await first.aclose()
    await subscribers(house, 1)
    house.run(house.endpoints.close())
    with pytest.raises(StopAsyncIteration):
        await anext(second)


async def test_a_dead_workers_envoys_are_not_waited_for(house: House) -> None:
    worker = house.worker()
    stream = worker.discovery.serve(envoy(DiscoveryRequest(resource_names=["fleet"]).SerializeToString()))
    version = house.run(house.endpoints.publish(FLEET))
    await anext(stream)
    await subscribers(house, 1)
    worker.parent.link.close()
    assert house.run(house.endpoints.acknowledged(version, timeout_s=5))
    await subscribers(house, 0)
    await stream.aclose()
