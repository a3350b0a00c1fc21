"""The least that an external processor in Python can cost: `python -m bench.floor LISTEN ENDPOINT`.

It reads nothing and decides nothing; each message gets a constant reply. What the real one costs beyond it is ours,
the rest is Envoy's exchange and gRPC's.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

from extproc.core.replica import Replica
from extproc.core.router import Router
from extproc.eds import EndpointDiscovery
from extproc.messages import Continue, Phase, Route
from extproc.picker import EndpointPicker
from extproc.server import Server, ServerSettings
from extproc.wire import encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

REQUEST_HEADERS: Final = 0x12
REQUEST_BODY: Final = 0x22
RESPONSE_HEADERS: Final = 0x1A
"""First byte of a ProcessingRequest: the field that is set in it."""


class Floor(Server):
    """A server whose exchange is a table of three replies."""

    def __init__(self, listen: str, endpoint: str) -> None:
        self.endpoints = EndpointDiscovery()
        settings = ServerSettings(listen=listen, notice_s=0.0, drain_s=1.0)
        super().__init__(settings, EndpointPicker(Router()), self.endpoints)
        self._replies = {
            REQUEST_HEADERS: b"".join(encode(Continue(Phase.REQUEST_HEADERS))),
            REQUEST_BODY: b"".join(encode(Route(Phase.REQUEST_BODY, endpoint))),
            RESPONSE_HEADERS: b"".join(encode(Continue(Phase.RESPONSE_HEADERS))),
        }

    async def _process(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for message in requests:
            await context.write(self._replies[message[0]])


async def main(listen: str, endpoint: str) -> None:
    floor = Floor(listen, endpoint)
    await floor.start()
    await floor.endpoints.publish([Replica("only", endpoint)])
    await floor.set_ready(True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await floor.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
