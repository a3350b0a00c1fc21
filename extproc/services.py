"""What the gRPC port serves, on whatever transport: the external processor, endpoint discovery, health."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from extproc.call import INVALID_ARGUMENT, NOT_FOUND
from extproc.exchange import Exchange
from extproc.wire import UnknownMessage, decode, encode

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping

    from extproc.call import Answering, Service
    from extproc.eds import DiscoveryStreams
    from extproc.picker import Picker

EXTERNAL_PROCESSOR: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
ENDPOINT_DISCOVERY: Final = "envoy.service.endpoint.v3.EndpointDiscoveryService"
HEALTH: Final = "grpc.health.v1.Health"

TRACE_CONTEXT: Final = ("traceparent", "tracestate")
"""W3C Trace Context, as HTTP headers and as gRPC metadata alike."""


def services(picker: Picker, endpoints: DiscoveryStreams, health: Health, errors: Counter[str]) -> dict[str, Service]:
    """By path. errors: counts ext_proc streams that broke off, by kind."""
    return {
        f"/{EXTERNAL_PROCESSOR}/Process": lambda answering, metadata: Process(picker, errors, answering, metadata),
        f"/{ENDPOINT_DISCOVERY}/StreamEndpoints": lambda answering, _: Discovery(endpoints, answering),
        f"/{HEALTH}/Check": lambda answering, _: Check(health, answering),
        f"/{HEALTH}/Watch": lambda answering, _: Watch(health, answering),
    }


class Process:
    """One ext_proc stream: an exchange on a call."""

    def __init__(self, picker: Picker, errors: Counter[str], answering: Answering, metadata: Mapping[str, str]) -> None:
        # What a data plane that traces sends with the call: its own span, child of the client's.
        trace = {name: metadata[name] for name in TRACE_CONTEXT if name in metadata}
        self._exchange = Exchange(picker, trace_context=trace)
        self._errors = errors
        self._answering = answering

    def received(self, message: bytes) -> None:
        try:
            for reply in self._exchange.receive(decode(message)):
                for response in encode(reply):
                    self._answering.send(response)
        except UnknownMessage as error:
            self._errors["unknown_message"] += 1
            self._answering.end(INVALID_ARGUMENT, str(error))
        except Exception:
            self._errors["fault"] += 1
            raise

    def half_closed(self) -> None:
        self._answering.end()

    def closed(self) -> None:
        self._exchange.close()


class Discovery:
    """One EDS stream. It is as long as an Envoy lives and says little, so a task may serve it.

    Iterates over what Envoy asks; a class rather than a generator, which mypyc does not know to compile.
    """

    def __init__(self, endpoints: DiscoveryStreams, answering: Answering) -> None:
        self._answering = answering
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._serve(endpoints))

    def received(self, message: bytes) -> None:
        self._requests.put_nowait(message)

    def half_closed(self) -> None:
        self._requests.put_nowait(None)

    def closed(self) -> None:
        self._task.cancel()

    async def _serve(self, endpoints: DiscoveryStreams) -> None:
        try:
            async for response in endpoints.serve(self):
                self._answering.send(response)
        finally:
            self._answering.end()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        message = await self._requests.get()
        if message is None:
            raise StopAsyncIteration
        return message


class Health:
    """The health of each service name (grpc/doc/health-checking.md)."""

    def __init__(self) -> None:
        self.watchers: set[Watch] = set()
        self._serving: dict[str, bool] = {}

    def set(self, service: str, serving: bool) -> None:
        self._serving[service] = serving
        for watcher in tuple(self.watchers):
            watcher.look()

    def close(self) -> None:
        """Nobody watches any more."""
        for watcher in tuple(self.watchers):
            watcher.end()

    def of(self, service: str) -> HealthCheckResponse:
        serving = self._serving.get(service)
        if serving is None:
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        return HealthCheckResponse(status=HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING)


class Check:
    """One question, one answer."""

    def __init__(self, health: Health, answering: Answering) -> None:
        self._health = health
        self._answering = answering

    def received(self, message: bytes) -> None:
        answer = self._health.of(HealthCheckRequest.FromString(message).service)
        if answer.status == HealthCheckResponse.SERVICE_UNKNOWN:
            self._answering.end(NOT_FOUND)
            return
        self._answering.send(answer.SerializeToString())
        self._answering.end()

    def half_closed(self) -> None:
        self._answering.end(INVALID_ARGUMENT, "no request")

    def closed(self) -> None:
        pass


class Watch:
    """One question, an answer at each change."""

    def __init__(self, health: Health, answering: Answering) -> None:
        self._health = health
        self._answering = answering
        self._service = ""
        self._told = b""

    def received(self, message: bytes) -> None:
        self._service = HealthCheckRequest.FromString(message).service
        self._health.watchers.add(self)
        self.look()

    def look(self) -> None:
        answer: bytes = self._health.of(self._service).SerializeToString()
        if answer != self._told:
            self._told = answer
            self._answering.send(answer)

    def end(self) -> None:
        self._answering.end()

    def half_closed(self) -> None:
        """A watcher asks once and goes on watching."""

    def closed(self) -> None:
        self._health.watchers.discard(self)
