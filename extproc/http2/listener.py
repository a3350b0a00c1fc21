"""Sockets under the connections: accepting, TLS, the way out, keepalive, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import TYPE_CHECKING, Final, cast

from extproc.address import join_address, socket_path, split_address
from extproc.http2.connection import Connection

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

    from extproc.call import Service

READ_BYTES: Final = 256 * 1024
BACKLOG: Final = 1024
TLS_HANDSHAKE_S: Final = 10.0
ACCEPT_PAUSE_S: Final = 1.0
"""Out of descriptors: asyncio's own servers wait as long."""

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
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._path = ""

    def listen(self, address: str) -> str:
        """Bind and accept; returns the address really bound. Raises OSError."""
        self._path = socket_path(address)
        if self._path:
            self._socket = _unix_socket(self._path)
            bound = address
        else:
            self._socket = _tcp_socket(*split_address(address))
            bound = join_address(split_address(address)[0], self._socket.getsockname()[1])
        self._socket.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._socket))
        return bound

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
        self._stop_accepting()
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

    def _stop_accepting(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            if self._path:
                os.unlink(self._path)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        handshakes: set[asyncio.Task[None]] = set()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:
                log.error("cannot accept a connection: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            task = asyncio.create_task(self.serve(accepted))
            handshakes.add(task)
            task.add_done_callback(handshakes.discard)


def _tcp_socket(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _unix_socket(path: str) -> socket.socket:
    """In place of a socket that a crash left over."""
    listening = socket.socket(socket.AF_UNIX)
    try:
        if os.path.exists(path):
            os.unlink(path)
        listening.bind(path)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
