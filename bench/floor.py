"""The least that an external processor in Python can cost: `python -m bench.floor LISTEN ENDPOINT [TRANSPORT]`.

It reads nothing and decides nothing; each message gets a constant reply. What the real one costs beyond it is ours,
the rest is Envoy's exchange and gRPC's.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Final

from extproc.core.replica import Replica
from extproc.core.router import Router
from extproc.eds import EndpointDiscovery
from extproc.messages import Continue, Phase, Route
from extproc.picker import EndpointPicker
from extproc.server import Server, ServerSettings, Transport
from extproc.services import EXTERNAL_PROCESSOR
from extproc.wire import encode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.call import Answering

REQUEST_HEADERS: Final = 0x12
REQUEST_BODY: Final = 0x22
RESPONSE_HEADERS: Final = 0x1A
"""First byte of a ProcessingRequest: the field that is set in it."""


class Constant:
    """One stream: a table of three replies."""

    def __init__(self, replies: Mapping[int, bytes], answering: Answering) -> None:
        self._replies = replies
        self._answering = answering

    def received(self, message: bytes) -> None:
        self._answering.send(self._replies[message[0]])

    def half_closed(self) -> None:
        self._answering.end()

    def closed(self) -> None:
        pass


class Floor(Server):
    """A server whose exchange says always the same."""

    def __init__(self, listen: str, endpoint: str, transport: Transport) -> None:
        self.endpoints = EndpointDiscovery()
        settings = ServerSettings(listen, notice_s=0.0, drain_s=1.0, transport=transport)
        super().__init__(settings, EndpointPicker(Router()), self.endpoints)
        replies = {
            REQUEST_HEADERS: b"".join(encode(Continue(Phase.REQUEST_HEADERS))),
            REQUEST_BODY: b"".join(encode(Route(Phase.REQUEST_BODY, endpoint))),
            RESPONSE_HEADERS: b"".join(encode(Continue(Phase.RESPONSE_HEADERS))),
        }
        self._services[f"/{EXTERNAL_PROCESSOR}/Process"] = lambda answering, _: Constant(replies, answering)


async def main(listen: str, endpoint: str, transport: str = Transport.HTTP2) -> None:
    floor = Floor(listen, endpoint, Transport(transport))
    await floor.start()
    await floor.endpoints.publish([Replica("only", endpoint)])
    floor.set_ready(True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await floor.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
