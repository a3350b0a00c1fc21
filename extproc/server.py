"""One gRPC port for Envoy: the external processor, endpoint discovery and health.

asyncio rather than threads: a stream stays open for a whole generation, and a synchronous gRPC server would pin a
thread to each of them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.address import check_address, join_address, socket_path, split_address
from extproc.certificates import CertificateFiles
from extproc.exchange import Exchange
from extproc.wire import UnknownMessage, decode, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from extproc.eds import EndpointDiscovery
    from extproc.picker import Picker

EXTERNAL_PROCESSOR: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
ENDPOINT_DISCOVERY: Final = "envoy.service.endpoint.v3.EndpointDiscoveryService"

LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
"""Names of health services of the endpoint picker protocol (Gateway API Inference Extension, proposal 004)."""
READY_SERVICES: Final = ("", READINESS, EXTERNAL_PROCESSOR)
TRACE_CONTEXT: Final = frozenset({"traceparent", "tracestate"})
"""W3C Trace Context, as HTTP headers and as gRPC metadata alike."""

log = logging.getLogger(__name__)

_RpcContext = grpc.aio.ServicerContext[bytes, bytes]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The gRPC port.

    listen: "host:port", port 0 takes a free one; or "unix:/path", open to those who may write where the umask lets.
    tls_certificate, tls_key: PEM files, the certificate first, then what leads to its authority. Replaced ones hold
        from the next connection on. Empty: plain text.
    tls_client_ca: PEM file of the authorities whose certificates may call. Empty: whoever reaches the port may.
    max_message_bytes: largest message accepted; must hold the largest body that Envoy buffers (8 MiB) and its
        envelope. grpcio's own default of 4 MiB would turn a 5 MB body into an error.
    notice_s: at shutdown, between saying "not serving" and refusing streams: Envoy checks health every second
        and needs two answers (envoy/bootstrap.yaml).
    drain_s: at shutdown, time for open streams to end before they are cut. A cut stream costs its request
        nothing: it has been routed, and Envoy lets it run on.
    keepalive_s: how often a silent connection is pinged, so that one whose peer vanished frees its leases.
    """

    listen: str = "127.0.0.1:50051"
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    max_message_bytes: int = 16 * 1024 * 1024
    notice_s: float = 2.0
    drain_s: float = 10.0
    keepalive_s: float = 10.0

    def __post_init__(self) -> None:
        try:
            check_address(self.listen)
        except ValueError as error:
            raise ValueError(f"listen: {error}") from None
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate and tls_key go together")
        if self.tls_client_ca and not self.tls_certificate:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        if not (self.max_message_bytes > 0 and self.keepalive_s > 0):
            raise ValueError("max_message_bytes and keepalive_s must be above 0")
        if not (self.notice_s >= 0 and self.drain_s >= 0):
            raise ValueError("notice_s and drain_s must be at least 0")


class Server:
    """Serves from `start` to `stop`, on the running event loop. Not ready until `set_ready(True)`.

    stream_errors: ext_proc streams that broke off, by kind: a message of an unknown kind, or a fault of ours.
    """

    def __init__(self, settings: ServerSettings, picker: Picker, endpoints: EndpointDiscovery) -> None:
        self._settings = settings
        self._picker = picker
        self._endpoints = endpoints
        self.stream_errors = Counter({"unknown_message": 0, "fault": 0})
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # newer than its stubs
        self._grpc = grpc.aio.server(options=_channel_options(settings))
        self._grpc.add_generic_rpc_handlers(
            (
                # No (de)serializers: bytes pass as they are, and extproc.wire parses what is needed.
                grpc.method_handlers_generic_handler(
                    EXTERNAL_PROCESSOR, {"Process": grpc.stream_stream_rpc_method_handler(self._process)}
                ),
                grpc.method_handlers_generic_handler(
                    ENDPOINT_DISCOVERY,
                    {"StreamEndpoints": grpc.stream_stream_rpc_method_handler(self._stream_endpoints)},
                ),
            )
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)

    async def start(self) -> str:
        """Begin to serve; returns the address really bound. Raises RuntimeError where it cannot be, or TLS cannot."""
        bound = self._bind()
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)
        await self._grpc.start()
        return bound

    def _bind(self) -> str:
        listen = self._settings.listen
        path = socket_path(listen)
        if path and _is_served(path):
            raise RuntimeError(f"{listen}: another process listens there")
        if self._settings.tls_certificate:
            files = CertificateFiles(
                self._settings.tls_certificate, self._settings.tls_key, self._settings.tls_client_ca
            )
            try:
                port = self._grpc.add_secure_port(listen, files.credentials())
            except ValueError as error:
                raise RuntimeError(f"server.{error}") from error
        else:
            port = self._grpc.add_insecure_port(listen)
        return listen if path else join_address(split_address(listen)[0], port)

    async def set_ready(self, ready: bool) -> None:
        """Say whether the fleet is known. While it is not, Envoy routes by its own fallback."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in READY_SERVICES:
            await self._health.set(service, status)

    async def stop(self) -> None:
        """Leave gracefully: not ready, then no new streams, then the end of the open ones within `drain_s`."""
        await self.set_ready(False)
        await asyncio.sleep(self._settings.notice_s)
        await self._endpoints.close()
        await self._grpc.stop(self._settings.drain_s)

    async def _process(self, requests: AsyncIterator[bytes], context: _RpcContext) -> None:
        exchange = Exchange(self._picker, trace_context=_trace_context(context))
        try:
            async for message in requests:
                for reply in exchange.receive(decode(message)):
                    for response in encode(reply):
                        await context.write(response)
        except UnknownMessage as error:
            self.stream_errors["unknown_message"] += 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception:
            self.stream_errors["fault"] += 1
            raise
        finally:
            exchange.close()

    async def _stream_endpoints(self, requests: AsyncIterator[bytes], _context: _RpcContext) -> AsyncIterator[bytes]:
        async for response in self._endpoints.serve(requests):
            yield response


def _is_served(path: str) -> bool:
    """gRPC replaces a socket that stands there: right for one that a crash left over, not for one in use."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def _trace_context(context: _RpcContext) -> dict[str, str]:
    """What a data plane that traces sends with the call: its own span, child of the client's."""
    metadata = context.invocation_metadata() or ()
    return {key: str(value) for key, value in metadata if key in TRACE_CONTEXT}


def _channel_options(settings: ServerSettings) -> list[tuple[str, Any]]:
    keepalive_ms = round(settings.keepalive_s * 1000)
    return [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),  # full duplex gives bodies back
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        # Envoy pings too, with no call open; grpcio would answer the third such ping with GOAWAY.
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Otherwise a second router on the same port would silently take half of the connections.
        ("grpc.so_reuseport", 0),
    ]
