"""A TCP relay before a real server, that is where the network's faults are made: delay, silence, cuts."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from demo.ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHUNK_BYTES = 64 * 1024


@dataclass
class Relay:
    """Passes bytes on to `target` ("host:port") as they come.

    delay_s: for each chunk, either way. flowing: while cleared, nothing passes and nothing is closed.
    canned: beginning of a request -> the answer it gets instead of being passed on; then the connection is closed.
    """

    target: str
    port: int = field(default_factory=free_port)
    delay_s: float = 0.0
    flowing: asyncio.Event = field(default_factory=asyncio.Event)
    canned: dict[bytes, bytes] = field(default_factory=dict)
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> int:
        """Reset all connections; returns how many there were."""
        for writer in (cut := [*self._open]):
            writer.transport.abort()
        return len(cut)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Relay]:
        self.flowing.set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        try:
            yield self
        finally:
            server.close()
            self.flowing.set()
            self.cut()
            await asyncio.gather(*self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        try:
            await self.flowing.wait()
            host, _, port = self.target.rpartition(":")
            with contextlib.suppress(OSError):
                behind_reader, behind_writer = await asyncio.open_connection(host, int(port))
                self._open.add(behind_writer)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pass(reader, behind_writer, writer))
                    group.create_task(self._pass(behind_reader, writer, writer))
                self._open -= {behind_writer}
        finally:
            writer.transport.abort()
            self._open.discard(writer)
            self._tasks.discard(task)

    async def _pass(self, source: asyncio.StreamReader, to: asyncio.StreamWriter, client: asyncio.StreamWriter) -> None:
        """One direction. Latency, not a bottleneck: chunks are on their way side by side, and arrive in order."""
        clock = asyncio.get_running_loop().time
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def arrive() -> None:
            while (arrival := await under_way.get())[1]:
                await asyncio.sleep(arrival[0] - clock())
                await self.flowing.wait()
                to.write(arrival[1])
                await to.drain()

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(arrive())
                while chunk := await source.read(CHUNK_BYTES):
                    given = [answer for begins, answer in self.canned.items() if chunk.startswith(begins)]
                    if given and to is not client:
                        client.write(given[0])
                        break
                    under_way.put_nowait((clock() + self.delay_s, chunk))
                under_way.put_nowait((0.0, b""))
        except* OSError:
            pass
        # What one side has closed is of no use to the other; what was written before it still goes out.
        client.close()
        to.close()
