"""One gRPC port for Envoy: the external processor, endpoint discovery and health.

Two transports carry the same services: our own HTTP/2 on asyncio (extproc/http2), and grpcio's.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from extproc.address import check_address, join_address, socket_path, split_address
from extproc.certificates import CertificateFiles
from extproc.http2.listener import Listener
from extproc.services import EXTERNAL_PROCESSOR, Health, services

if TYPE_CHECKING:
    from extproc.eds import DiscoveryStreams
    from extproc.grpcio_transport import GrpcioTransport
    from extproc.picker import Picker

LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
"""Names of health services of the endpoint picker protocol (Gateway API Inference Extension, proposal 004)."""
READY_SERVICES: Final = ("", READINESS, EXTERNAL_PROCESSOR)


class Transport(StrEnum):
    """What carries the gRPC calls."""

    HTTP2 = "http2"
    GRPCIO = "grpcio"


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
    transport: "http2" (extproc/http2) or "grpcio" (gRPC's own core, which costs several times the CPU:
        docs/performance.md).
    workers: processes that read requests, for one that decides (extproc/workers); 1: it does both. An Envoy gives each
        of its threads one connection, and a connection is one worker's: more workers than such threads stay idle.
    """

    listen: str = "127.0.0.1:50051"
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    max_message_bytes: int = 16 * 1024 * 1024
    notice_s: float = 2.0
    drain_s: float = 10.0
    keepalive_s: float = 10.0
    transport: Transport = Transport.HTTP2
    workers: int = 1

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
        if self.workers < 1:
            raise ValueError("workers must be at least 1")
        if self.workers > 1 and self.transport is not Transport.HTTP2:
            raise ValueError('more than one of workers needs transport = "http2": grpcio takes no connections over')


class Server:
    """Serves from `start` to `stop`, on the running event loop. Not ready until `set_ready(True)`.

    stream_errors: ext_proc streams that broke off, by kind: a message of an unknown kind, or a fault of ours.
    """

    def __init__(self, settings: ServerSettings, picker: Picker, endpoints: DiscoveryStreams) -> None:
        self._settings = settings
        self._endpoints = endpoints
        self.stream_errors = Counter({"unknown_message": 0, "fault": 0})
        self._health = Health()
        self._services = services(picker, endpoints, self._health, self.stream_errors)
        self._transport: Listener | GrpcioTransport | None = None

    async def start(self) -> str:
        """Begin to serve; returns the address really bound. Raises RuntimeError where it cannot be, or TLS cannot."""
        settings = self._settings
        check_free(settings.listen)
        match settings.transport:
            case Transport.HTTP2:
                listener = self.open()
                try:
                    return listener.listen(settings.listen)
                except OSError as error:
                    raise RuntimeError(f"cannot listen on {settings.listen}: {error.strerror or error}") from error
            case Transport.GRPCIO:
                return await self._start_grpcio()

    def open(self) -> Listener:
        """Serve what the listener is given, and listen nowhere. Raises RuntimeError where TLS cannot be."""
        settings = self._settings
        try:
            tls = certificates(settings).contexts() if settings.tls_certificate else None
        except ValueError as error:
            raise RuntimeError(f"server.{error}") from error
        self._begin()
        listener = Listener(self._services, settings.max_message_bytes, settings.keepalive_s, tls)
        self._transport = listener
        return listener

    def _begin(self) -> None:
        self._health.set(LIVENESS, True)
        self.set_ready(False)

    async def _start_grpcio(self) -> str:
        from extproc.grpcio_transport import GrpcioTransport  # noqa: PLC0415  # see certificates.py

        settings = self._settings
        try:
            credentials = certificates(settings).credentials() if settings.tls_certificate else None
        except ValueError as error:
            raise RuntimeError(f"server.{error}") from error
        self._begin()
        transport = GrpcioTransport(self._services, settings.max_message_bytes, settings.keepalive_s)
        port = await transport.start(settings.listen, credentials)
        self._transport = transport
        path = socket_path(settings.listen)
        return settings.listen if path else join_address(split_address(settings.listen)[0], port)

    def set_ready(self, ready: bool) -> None:
        """Say whether the fleet is known. While it is not, Envoy routes by its own fallback."""
        for service in READY_SERVICES:
            self._health.set(service, ready)

    async def stop(self) -> None:
        """Leave gracefully: not ready, then no new streams, then the end of the open ones within `drain_s`."""
        self.set_ready(False)
        await asyncio.sleep(self._settings.notice_s)
        await self._endpoints.close()
        self._health.close()
        if self._transport is not None:
            await self._transport.stop(self._settings.drain_s)


def certificates(settings: ServerSettings) -> CertificateFiles:
    return CertificateFiles(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)


def check_free(listen: str) -> None:
    """A socket that stands there is replaced: right for one that a crash left over, not for one in use.

    Raises RuntimeError where it is in use.
    """
    path = socket_path(listen)
    if not path:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == 0:
            raise RuntimeError(f"{listen}: another process listens there")
