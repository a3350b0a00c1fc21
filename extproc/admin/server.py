"""The admin port itself: an ASGI application on the router's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Final

import uvicorn

from extproc.address import split_address
from extproc.admin.listener import Listener

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from starlette.types import ASGIApp

CONNECTIONS: Final = 100
"""More are told 503: whoever watches must not keep decisions waiting."""


class AdminServer:
    """Serves an application at `listen` ("host:port") between `start` and `stop`."""

    def __init__(self, listen: str, app: ASGIApp) -> None:
        self._listen = listen
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                limit_concurrency=CONNECTIONS,
                timeout_graceful_shutdown=1,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises OSError where the port can't be had."""
        # Bound here, since uvicorn would leave the process where the port is taken.
        host, port = split_address(self._listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = Listener(family)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen()  # who is told that the router serves may ask at once
        except OSError as error:
            raise OSError(error.errno, f"admin.listen: {self._listen} can't be had: {error.strerror}") from error
        self._task = asyncio.create_task(self._server.serve([listening]))

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task


class _Server(uvicorn.Server):
    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """The signals are the service's, which ends this server in its own time."""
        return contextlib.nullcontext()
