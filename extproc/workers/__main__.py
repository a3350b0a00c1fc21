"""A worker's process: `python -m extproc.workers DESCRIPTOR`, the end of a socket to its parent."""

from __future__ import annotations

import asyncio
import socket
import sys

from extproc import log
from extproc.memory import calm_collector, keep_memory
from extproc.workers.worker import Worker


async def main(descriptor: int) -> None:
    worker = Worker(socket.socket(fileno=descriptor))
    calm_collector()
    keep_memory()
    await worker.run()


if __name__ == "__main__":
    log.configure()
    asyncio.run(main(int(sys.argv[1])))
