"""A listening socket: connections come in, whoever is to serve them gets them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from typing import TYPE_CHECKING, Final

from extproc.address import join_address, socket_path, split_address

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

BACKLOG: Final = 1024
ACCEPT_PAUSE_S: Final = 1.0
"""Out of descriptors: asyncio's own servers wait as long."""

log = logging.getLogger(__name__)


class Port:
    """Accepts on the running event loop. serve: takes over one connection."""

    def __init__(self, serve: Callable[[socket.socket], Coroutine[None, None, None]]) -> None:
        self._serve = serve
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

    def close(self) -> None:
        """Accept nobody any more. Idempotent."""
        if self._accepting is not None:
            self._accepting.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            if self._path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        handovers: set[asyncio.Task[None]] = set()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                log.error("cannot accept a connection: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            task = asyncio.create_task(self._serve(accepted))
            handovers.add(task)
            task.add_done_callback(handovers.discard)


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
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):  # any other file stays, and bind fails
            os.unlink(path)
        listening.bind(path)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
