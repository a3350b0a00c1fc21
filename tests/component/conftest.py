"""The real gRPC server on a free port, and a real client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import pytest_asyncio
from envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from extproc.core.replica import Replica
from extproc.core.router import Router
from extproc.eds import EndpointDiscovery
from extproc.picker import EndpointPicker
from extproc.server import Server, ServerSettings, Transport
from extproc.services import ENDPOINT_DISCOVERY, EXTERNAL_PROCESSOR

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

Stream = Any
"""A call in grpc's reader and writer style; its stubs know the iterator style only."""

FLEET = [Replica(f"replica-{number}", f"10.0.0.{number}:8000") for number in range(1, 5)]


@dataclass
class Service:
    """A server under test and what stands behind it."""

    router: Router = field(default_factory=Router)
    endpoints: EndpointDiscovery = field(default_factory=EndpointDiscovery)
    address: str = ""
    transport: Transport = Transport.HTTP2

    def __post_init__(self) -> None:
        settings = ServerSettings("127.0.0.1:0", notice_s=0.0, drain_s=0.2, transport=self.transport)
        self.server = Server(settings, EndpointPicker(self.router), self.endpoints)

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address)

    def process(self, channel: grpc.aio.Channel) -> Stream:
        """An ext_proc stream."""
        call: Any = channel.stream_stream(
            f"/{EXTERNAL_PROCESSOR}/Process",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        return call()

    def discover(self, channel: grpc.aio.Channel) -> Stream:
        """An EDS stream."""
        call: Any = channel.stream_stream(
            f"/{ENDPOINT_DISCOVERY}/StreamEndpoints",
            request_serializer=DiscoveryRequest.SerializeToString,
            response_deserializer=DiscoveryResponse.FromString,
        )
        return call()


@pytest_asyncio.fixture(params=list(Transport))
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    service = Service(transport=request.param)
    service.address = await service.server.start()
    yield service
    await service.server.stop()


@pytest_asyncio.fixture
async def channel(service: Service) -> AsyncIterator[grpc.aio.Channel]:
    async with service.channel() as channel:
        yield channel
