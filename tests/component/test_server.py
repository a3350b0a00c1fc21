"""The external processor and health over real gRPC."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from time import monotonic

import grpc
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders, ProcessingRequest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from demo.wait import until
from extproc.eds import EndpointDiscovery
from extproc.picker import EndpointPicker
from extproc.server import Server, ServerSettings
from tests.component.conftest import FLEET, Service

BUFFERED = 2
PATH = [(":method", b"POST"), (":path", b"/v1/chat/completions"), ("x-session-id", b"a")]


def opening(end_of_stream: bool = False) -> ProcessingRequest:
    message = ProcessingRequest(request_headers=HttpHeaders(end_of_stream=end_of_stream))
    for key, value in PATH:
        message.request_headers.headers.headers.add(key=key, raw_value=value)
    message.protocol_config.request_body_mode = BUFFERED
    return message


def body(content: bytes) -> ProcessingRequest:
    return ProcessingRequest(request_body=HttpBody(body=content, end_of_stream=True))


async def open_leases(service: Service, expected: int) -> None:
    async def reached() -> bool:
        return service.router.open_leases == expected

    await until(reached, f"{expected} open leases")


async def test_a_request_is_routed_and_its_lease_ends_with_the_stream(
    service: Service, channel: grpc.aio.Channel
) -> None:
    service.router.set_members(FLEET, monotonic())
    call = service.process(channel)
    await call.write(opening())
    assert (await call.read()).WhichOneof("response") == "request_headers"
    await call.write(body(b"{}"))
    picked = (await call.read()).dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]
    assert picked in {replica.endpoint for replica in FLEET}
    assert service.router.open_leases == 1
    await call.done_writing()
    assert await call.read() == grpc.aio.EOF  # type: ignore[attr-defined]  # missing in its stubs
    assert service.router.open_leases == 0


async def test_a_cancelled_stream_releases_its_lease(service: Service, channel: grpc.aio.Channel) -> None:
    service.router.set_members(FLEET, monotonic())
    call = service.process(channel)
    await call.write(opening(end_of_stream=True))
    await call.read()
    assert service.router.open_leases == 1
    call.cancel()
    await open_leases(service, 0)


async def test_a_vanished_client_releases_its_leases(service: Service) -> None:
    service.router.set_members(FLEET, monotonic())
    async with service.channel() as channel:
        for _ in range(5):
            call = service.process(channel)
            await call.write(opening(end_of_stream=True))
            await call.read()
        assert service.router.open_leases == 5
    await open_leases(service, 0)


async def test_the_largest_body_that_envoy_buffers_is_read(service: Service, channel: grpc.aio.Channel) -> None:
    service.router.set_members(FLEET, monotonic())
    call = service.process(channel)
    await call.write(opening())
    await call.read()
    await call.write(body(b'{"prompt": "' + b"x" * (8 << 20) + b'"}'))
    assert (await call.read()).WhichOneof("response") == "request_body"


async def test_an_unknown_message_ends_its_stream_only(service: Service, channel: grpc.aio.Channel) -> None:
    service.router.set_members(FLEET, monotonic())
    call = service.process(channel)
    await call.write(opening(end_of_stream=True))
    await call.read()
    await call.write(ProcessingRequest())
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert service.router.open_leases == 0
    second = service.process(channel)
    await second.write(opening(end_of_stream=True))
    assert (await second.read()).WhichOneof("response") == "request_headers"


async def test_a_thousand_streams_at_once(service: Service, channel: grpc.aio.Channel) -> None:
    """More than a server with a thread for each stream would take."""
    service.router.set_members(FLEET, monotonic())
    calls = [service.process(channel) for _ in range(1000)]
    await asyncio.gather(*(call.write(opening(end_of_stream=True)) for call in calls))
    await asyncio.gather(*(call.read() for call in calls))
    assert service.router.open_leases == 1000
    await asyncio.gather(*(call.done_writing() for call in calls))
    await open_leases(service, 0)


NOT_READY, READY = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("name", ["", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"])
async def test_health_follows_readiness(service: Service, channel: grpc.aio.Channel, name: str) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for ready, status in ((None, NOT_READY), (True, READY), (False, NOT_READY)):
        if ready is not None:
            service.server.set_ready(ready)
        assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == status


async def test_a_router_without_a_fleet_is_alive(channel: grpc.aio.Channel) -> None:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="liveness"))
    assert answer.status == READY


async def test_stopping_cuts_what_does_not_end_and_releases_it(service: Service, channel: grpc.aio.Channel) -> None:
    service.router.set_members(FLEET, monotonic())
    call = service.process(channel)
    await call.write(opening(end_of_stream=True))
    await call.read()
    await service.server.stop()
    await open_leases(service, 0)


async def test_a_port_in_use_is_an_error(service: Service) -> None:
    second = Server(ServerSettings(listen=service.address), EndpointPicker(service.router), EndpointDiscovery())
    with pytest.raises(RuntimeError):
        await second.start()


def test_the_default_transport_needs_nothing_of_grpcs_core() -> None:
    """It is many megabytes in each process, workers' among them."""
    loaded = "import sys, extproc.service, extproc.workers.worker; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0
