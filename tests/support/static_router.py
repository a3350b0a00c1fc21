"""A router process with a fixed fleet: `python -m tests.support.static_router LISTEN ENDPOINT...`."""

from __future__ import annotations

import asyncio
import signal
import sys
from time import monotonic

from extproc.core.replica import Replica
from extproc.core.router import Router
from extproc.eds import EndpointDiscovery
from extproc.picker import EndpointPicker
from extproc.server import Server, ServerSettings


async def main(listen: str, endpoints: list[str]) -> None:
    router, discovery = Router(), EndpointDiscovery()
    server = Server(ServerSettings(listen=listen, notice_s=0.0, drain_s=1.0), EndpointPicker(router), discovery)
    await server.start()
    replicas = [Replica(f"replica-{endpoint}", endpoint) for endpoint in endpoints]
    await discovery.publish(replicas)
    router.set_members(replicas, monotonic())
    server.set_ready(True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await server.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
