"""Endpoint discovery over real gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from envoy.config.core.v3.health_check_pb2 import DRAINING, HEALTHY
from envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse

from demo.wait import until
from extproc.core.replica import Replica
from extproc.services import ENDPOINT_DISCOVERY
from tests.component.conftest import FLEET, Service, Stream

TYPE_URL = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


async def subscribe(service: Service, channel: grpc.aio.Channel, node: str = "envoy-1") -> Stream:
    before = len(service.endpoints.subscribers)
    stream = service.discover(channel)
    request = DiscoveryRequest(type_url=TYPE_URL, resource_names=["fleet"])
    request.node.id = node
    await stream.write(request)

    async def subscribed() -> bool:
        return len(service.endpoints.subscribers) > before

    await until(subscribed, "the stream is subscribed")
    return stream


async def receive(stream: Stream) -> DiscoveryResponse:
    response = await asyncio.wait_for(stream.read(), 5)
    assert isinstance(response, DiscoveryResponse)
    return response


async def answer(stream: Stream, response: DiscoveryResponse, error: str | None = None) -> None:
    request = DiscoveryRequest(type_url=TYPE_URL, resource_names=["fleet"], response_nonce=response.nonce)
    if error is None:
        request.version_info = response.version_info
    else:
        request.error_detail.message = error
    await stream.write(request)


def assignment(response: DiscoveryResponse) -> ClusterLoadAssignment:
    (resource,) = response.resources
    assert resource.type_url == TYPE_URL
    return ClusterLoadAssignment.FromString(resource.value)


async def test_a_subscriber_is_told_the_fleet(service: Service, channel: grpc.aio.Channel) -> None:
    await service.endpoints.publish(
        [Replica("b", "10.0.0.2:8000", weight=0.5, draining=True), Replica("a", "[::1]:8000", weight=2.0)]
    )
    response = await receive(await subscribe(service, channel))
    load = assignment(response)
    assert load.cluster_name == "fleet"
    first, second = load.endpoints[0].lb_endpoints
    address = first.endpoint.address.socket_address
    assert (address.address, address.port_value) == ("::1", 8000)
    assert (first.health_status, second.health_status) == (HEALTHY, DRAINING)
    assert (first.load_balancing_weight.value, second.load_balancing_weight.value) == (200, 50)
    assert first.metadata.filter_metadata["envoy.lb"]["hash_key"] == "a"


async def test_nobody_is_told_anything_before_the_fleet_is_known(service: Service, channel: grpc.aio.Channel) -> None:
    stream = await subscribe(service, channel)
    read = asyncio.create_task(stream.read())
    version = await service.endpoints.publish(FLEET)
    assert (await asyncio.wait_for(read, 5)).version_info == str(version) == "1"


async def test_an_empty_fleet_is_news_too(service: Service, channel: grpc.aio.Channel) -> None:
    await service.endpoints.publish([])
    assert not assignment(await receive(await subscribe(service, channel))).endpoints[0].lb_endpoints


async def test_the_same_fleet_is_the_same_version(service: Service) -> None:
    versions = [await service.endpoints.publish(fleet) for fleet in (FLEET, FLEET[::-1], FLEET[:2], FLEET)]
    assert versions == [1, 1, 2, 3]


async def test_a_version_is_acknowledged_when_every_envoy_has(service: Service, channel: grpc.aio.Channel) -> None:
    one, two = await subscribe(service, channel, "envoy-1"), await subscribe(service, channel, "envoy-2")
    version = await service.endpoints.publish(FLEET)
    await answer(one, await receive(one))
    assert not await service.endpoints.acknowledged(version, timeout_s=0.1)
    waiting = asyncio.create_task(service.endpoints.acknowledged(version, timeout_s=5))
    await answer(two, await receive(two))
    assert await waiting
    assert {each.node: each.accepted for each in service.endpoints.subscribers} == {"envoy-1": 1, "envoy-2": 1}


async def test_without_envoys_there_is_nobody_to_wait_for(service: Service) -> None:
    assert await service.endpoints.acknowledged(await service.endpoints.publish(FLEET), timeout_s=5)


async def test_a_refused_version_is_not_acknowledged_and_the_next_may_be(
    service: Service, channel: grpc.aio.Channel
) -> None:
    stream = await subscribe(service, channel)
    refused = await service.endpoints.publish(FLEET)
    await answer(stream, await receive(stream), error="no")
    assert not await service.endpoints.acknowledged(refused, timeout_s=5)
    better = await service.endpoints.publish(FLEET[:1])
    await answer(stream, await receive(stream))
    assert await service.endpoints.acknowledged(better, timeout_s=5)


async def test_a_later_version_acknowledges_an_earlier_one(service: Service, channel: grpc.aio.Channel) -> None:
    stream = await subscribe(service, channel)
    earlier = await service.endpoints.publish(FLEET)
    await receive(stream)
    await service.endpoints.publish(FLEET[:1])
    await answer(stream, await receive(stream))
    assert await service.endpoints.acknowledged(earlier, timeout_s=5)


async def test_nobody_waits_for_an_envoy_that_left(service: Service, channel: grpc.aio.Channel) -> None:
    stream = await subscribe(service, channel)
    version = await service.endpoints.publish(FLEET)
    waiting = asyncio.create_task(service.endpoints.acknowledged(version, timeout_s=5))
    await receive(stream)
    stream.cancel()
    assert await waiting
    assert not service.endpoints.subscribers


async def test_an_envoy_that_comes_back_is_told_again(service: Service, channel: grpc.aio.Channel) -> None:
    await service.endpoints.publish(FLEET)
    first = await subscribe(service, channel)
    await receive(first)
    first.cancel()

    async def left() -> bool:
        return not service.endpoints.subscribers

    await until(left, "the first stream has ended")
    assert (await receive(await subscribe(service, channel))).version_info == "1"


async def test_an_acknowledgement_is_not_answered(service: Service, channel: grpc.aio.Channel) -> None:
    """Else server and client would talk for ever."""
    stream = await subscribe(service, channel)
    version = await service.endpoints.publish(FLEET)
    await answer(stream, await receive(stream))
    assert await service.endpoints.acknowledged(version, timeout_s=5)
    read = asyncio.create_task(stream.read())
    assert await service.endpoints.publish(FLEET[:3]) == 2
    assert (await asyncio.wait_for(read, 5)).version_info == "2"


async def test_a_leaving_service_ends_its_streams(service: Service, channel: grpc.aio.Channel) -> None:
    """Else each polite end would take all the time that open requests are given."""
    stream = await subscribe(service, channel)
    await service.endpoints.publish(FLEET)
    await receive(stream)
    await service.endpoints.close()
    assert await asyncio.wait_for(stream.read(), 5) is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK
    late = service.discover(channel)
    assert await asyncio.wait_for(late.read(), 5) is grpc.aio.EOF


async def test_a_stream_ends_when_its_envoy_has_said_all(service: Service, channel: grpc.aio.Channel) -> None:
    stream = await subscribe(service, channel)
    version = await service.endpoints.publish(FLEET)
    await receive(stream)
    await stream.done_writing()
    assert await asyncio.wait_for(stream.read(), 5) is grpc.aio.EOF
    assert await service.endpoints.acknowledged(version, timeout_s=5), "nobody is waited for"


async def test_what_is_no_request_ends_its_stream(service: Service, channel: grpc.aio.Channel) -> None:
    call: Any = channel.stream_stream(f"/{ENDPOINT_DISCOVERY}/StreamEndpoints")  # bytes as they are
    stream = call()
    await stream.write(b"\xff\xff")
    assert await asyncio.wait_for(stream.read(), 5) is grpc.aio.EOF
    assert not service.endpoints.subscribers
