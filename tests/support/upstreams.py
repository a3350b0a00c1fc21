"""Upstreams that say what reached them: small HTTP servers in the test's own event loop."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import WSMsgType, web

from demo.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Upstream:
    """Answers every request with its own address and the digest of the body.

    status: what it answers; 0 cuts the connection instead.
    chunks: under /stream*, each chunk put here is sent at once; None ends the answer, an empty one cuts the connection.
    """

    status: int = 200
    port: int = field(default_factory=free_port)
    seen: list[Seen] = field(default_factory=list)
    chunks: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    _runner: web.AppRunner | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/ws", self._websocket)
        app.router.add_post("/stream{path:.*}", self._stream)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        """From now on connections are refused."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _note(self, request: web.Request) -> bytes:
        body = await request.read()
        self.seen.append(Seen(request.method, request.path, request.headers, body))
        return body

    async def _answer(self, request: web.Request) -> web.Response:
        body = await self._note(request)
        if not self.status and request.transport is not None:
            request.transport.abort()
        digest = hashlib.sha256(body).hexdigest()
        return web.json_response({"endpoint": self.endpoint, "sha256": digest}, status=self.status)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        await self._note(request)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream", "x-endpoint": self.endpoint})
        answer.headers.update({"x-queue-depth": "0", "x-prompt-tokens": "7", "x-cached-tokens": "3"})
        await answer.prepare(request)
        while (chunk := await self.chunks.get()) is not None:
            if not chunk and request.transport is not None:
                request.transport.abort()
                break
            await answer.write(chunk)
        return answer

    async def _websocket(self, request: web.Request) -> web.WebSocketResponse:
        await self._note(request)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                await socket.send_str(f"{self.endpoint} {message.data}")
        return socket
