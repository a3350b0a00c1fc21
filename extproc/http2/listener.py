"""Sockets under the connections: TLS, the way out, keepalive, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Final, cast

from extproc.http2.connection import Connection
from extproc.port import Port

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

    from extproc.call import Service

READ_BYTES: Final = 256 * 1024
TLS_HANDSHAKE_S: Final = 10.0

log = logging.getLogger(__name__)


class Peer(asyncio.BufferedProtocol):
    """A connection on its socket."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self.connection = Connection(listener.services, listener.max_message_bytes, self._wake)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard = False
        self._asked = False

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # a loop's own classes need not derive from asyncio's
        self._listener.peers.add(self)
        if self._listener.leaving:  # its handshake took until now
            self.connection.leave()
        self._timer = self._loop.call_later(self._listener.keepalive_s, self._keep_alive)
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._listener.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = True
        self.connection.receive(self._listener.buffer[:nbytes].tobytes())
        self._flush()

    def pause_writing(self) -> None:
        # Who does not take answers is asked nothing more.
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._listener.peers.discard(self)
        self.connection.lost()
        self._listener.changed.set()

    # --- ours ---

    def send_away(self) -> None:
        self.connection.send_away()
        self._flush()

    def leave(self) -> None:
        self.connection.leave()
        self._flush()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _wake(self) -> None:
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._transport is None:
            return
        output = self.connection.take_output()
        if output:
            self._transport.write(output)
        if self.connection.failed:
            log.warning("a connection failed: %s", self.connection.failed)
            self._transport.close()
        elif self._listener.leaving:
            self._listener.changed.set()

    def _keep_alive(self) -> None:
        """A silent peer is asked, and one that does not even answer is gone: its leases must not stay."""
        if self._asked and not self._heard:
            self.abort()
            return
        self._asked = not self._heard
        if self._asked:
            self.connection.ping()
        self._heard = False
        self._timer = self._loop.call_later(self._listener.keepalive_s, self._keep_alive)


class Listener:
    """Accepts connections for `services`, on the running event loop.

    tls: makes the context of the next connection, so that a new certificate holds from then on; None: plain text.
    keepalive_s: how long a peer may be silent before it is asked, and again as long to answer.
    """

    def __init__(
        self,
        services: Mapping[str, Service],
        max_message_bytes: int,
        keepalive_s: float,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self.services = services
        self.max_message_bytes = max_message_bytes
        self.keepalive_s = keepalive_s
        self.buffer = memoryview(bytearray(READ_BYTES))  # read and left in one step, so one is enough for all peers
        self.peers: set[Peer] = set()
        self.changed = asyncio.Event()
        self.leaving = False
        self._tls = tls
        self._port: Port | None = None

    def listen(self, address: str) -> str:
        """Bind and accept; returns the address really bound. Raises OSError."""
        self._port = Port(self.serve)
        return self._port.listen(address)

    async def serve(self, accepted: socket.socket) -> None:
        """Take over one connection that is open."""
        accepted.setblocking(False)
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.get_running_loop()
        try:
            tls = self._tls() if self._tls is not None else None
            await loop.connect_accepted_socket(
                lambda: Peer(self),
                accepted,
                ssl=tls,
                ssl_handshake_timeout=TLS_HANDSHAKE_S if tls is not None else None,
            )
        except (OSError, ValueError, TimeoutError) as error:
            log.info("a connection was not made: %s", error)
            accepted.close()

    async def stop(self, drain_s: float) -> None:
        """Accept nobody, open no new streams, and wait for those that are open, at most `drain_s`."""
        if self._port is not None:
            self._port.close()
        self.leaving = True
        for peer in tuple(self.peers):
            peer.leave()
        try:
            async with asyncio.timeout(drain_s):
                while any(peer.connection.open_streams for peer in self.peers):
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            pass
        for peer in tuple(self.peers):
            peer.abort()
