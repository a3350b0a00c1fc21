"""What it costs to ask another process: `python -m bench.workers`.

A worker reads chats of 16 KiB and has its parent decide, over the link that `extproc serve --workers` has; beside it
one process that does both. Each request is decided, its answer begins, its stream ends. One at a time, a decision's
time is that of two processes that wake each other; many at a time travel together.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from time import monotonic, perf_counter, process_time
from typing import TYPE_CHECKING, Final

from greenlet import greenlet

from bench.core import CONVERSATIONS, chat
from extproc.core.features import FeatureSettings
from extproc.core.replica import Replica
from extproc.core.router import Router
from extproc.eds import EndpointDiscovery
from extproc.picker import EndpointPicker, ResponseStart
from extproc.workers.desk import Desk
from extproc.workers.link import Link
from extproc.workers.remote import Parent, RemotePicker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

    from extproc.core.request import Request
    from extproc.picker import Picker

REQUESTS: Final = 6_000
AT_A_TIME: Final = (1, 8, 32)
STARTED: Final = ResponseStart(200, True, None, None, None, None)


def endpoint_picker() -> EndpointPicker:
    router = Router()
    router.set_members([Replica(f"r{number}", f"10.0.0.{number}:8000") for number in range(4)], monotonic())
    return EndpointPicker(router)


def route(picker: Picker, request: Request) -> float:
    """The whole life of a request; seconds that its decision took."""
    began_s = perf_counter()
    routed = picker.pick(request, None)
    took_s = perf_counter() - began_s
    routed.response_started(STARTED)
    routed.finish()
    return took_s


def parent(end: socket.socket, workers: socket.socket, told: Connection) -> None:
    """Answers until its worker leaves; tells the CPU seconds that it took."""
    workers.close()

    async def answer() -> None:
        left = asyncio.Event()

        def readable() -> None:
            for message in link.take():
                desk.hear(message)
            if link.ended:
                left.set()

        link = Link(end, readable)
        desk = Desk(link, endpoint_picker(), EndpointDiscovery())
        began_s = process_time()
        await left.wait()
        told.send(process_time() - began_s)

    asyncio.run(answer())


async def work(end: socket.socket, chats: Sequence[Request], at_a_time: int) -> tuple[list[float], float]:
    """As a worker: how long each decision took, and the CPU seconds of all."""
    asked = Parent(end, print, lambda: None)
    picker = RemotePicker(asked, FeatureSettings())
    took_s: list[float] = []
    done = asyncio.Event()

    def play(requests: Iterator[Request]) -> None:
        took_s.extend(route(picker, request) for request in requests)
        if len(took_s) == REQUESTS:
            done.set()

    requests = (chats[number % len(chats)] for number in range(REQUESTS))
    began_s = process_time()
    for _ in range(at_a_time):
        greenlet(play).switch(requests)
    await done.wait()
    used_s = process_time() - began_s
    asked.link.close()
    return took_s, used_s


def main() -> None:
    chats = [chat(number, 16 * 1024) for number in range(CONVERSATIONS)]
    picker = endpoint_picker()
    began_s = process_time()
    for number in range(REQUESTS):
        route(picker, chats[number % len(chats)])
    print(f"one process             CPU {(process_time() - began_s) / REQUESTS * 1e6:4.0f} us a request")
    fork = multiprocessing.get_context("fork")
    for at_a_time in AT_A_TIME:
        ours, theirs = socket.socketpair()
        reading, telling = fork.Pipe(duplex=False)
        process = fork.Process(target=parent, args=(ours, theirs, telling))
        process.start()
        ours.close()
        took_s, used_s = asyncio.run(work(theirs, chats, at_a_time))
        parent_s = reading.recv()
        process.join()
        took_s.sort()
        print(
            f"asked {at_a_time:2} at a time    worker {used_s / REQUESTS * 1e6:4.0f}, parent"
            f" {parent_s / REQUESTS * 1e6:4.0f} us; reading and decided in p50 {took_s[REQUESTS // 2] * 1e3:.2f},"
            f" p99 {took_s[REQUESTS * 99 // 100] * 1e3:.2f} ms"
        )


if __name__ == "__main__":
    main()
