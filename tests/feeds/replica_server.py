"""A replica's HTTP face as far as feeds look at it: a raw server on loopback that does what the test says."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from extproc.core.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Mapping

Answer = tuple[int, bytes]


@dataclass
class ReplicaServer:
    """An async context manager.

    pages: path without query -> status and body; other paths are 404. raw: sent instead of any answer. hang: never
    answer. close_after_answer: close the connection then, without having announced it.
    asked: the targets of all requests, query included. connections: opened so far.
    """

    pages: Mapping[str, Answer] = field(default_factory=dict)
    raw: bytes | None = None
    hang: bool = False
    close_after_answer: bool = False
    asked: list[str] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def replica(self, replica_id: str = "a") -> Replica:
        return Replica(replica_id, self.endpoint)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                target = head.split(b" ")[1].decode()
                self.asked.append(target)
                if self.hang:
                    continue
                writer.write(self.raw if self.raw is not None else self._answer(target))
                await writer.drain()
                if self.close_after_answer:
                    break
        writer.close()
        self._writers.discard(writer)

    def _answer(self, target: str) -> bytes:
        status, body = self.pages.get(target.partition("?")[0], (404, b"not found"))
        return b"HTTP/1.1 %d Word\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)
