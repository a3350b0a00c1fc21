"""The parent's side in a thread of its own, and workers' pickers in the test's."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from greenlet import greenlet

from extproc.core.features import FeatureSettings
from extproc.core.router import Router
from extproc.eds import EndpointDiscovery
from extproc.picker import EndpointPicker
from extproc.workers.desk import Desk
from extproc.workers.link import Link
from extproc.workers.remote import Parent, RemoteDiscovery, RemotePicker
from extproc.workers.words import ENDPOINTS
from tests.support.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from extproc.core.replica import Replica
    from extproc.core.request import Request
    from extproc.core.settings import RouterSettings
    from extproc.picker import RoutedRequest
    from extproc.workers.link import Message

T = TypeVar("T")

MAX_UNREAD_BYTES = 8 << 20


@dataclass
class Worker:
    """One worker as far as the link goes. lost: how often it was told that its parent is gone."""

    end: socket.socket
    lost: int = 0

    def __post_init__(self) -> None:
        self.parent = Parent(self.end, self._heard, self._lost)
        self.picker = RemotePicker(self.parent, FeatureSettings(), MAX_UNREAD_BYTES)
        self.discovery = RemoteDiscovery(self.parent)

    async def pick(self, request: Request, allowed: frozenset[str] | None = None) -> RoutedRequest:
        return await waiting(lambda: self.picker.pick(request, allowed))

    def _heard(self, message: Message) -> None:
        assert message[0] == ENDPOINTS
        self.discovery.respond(message[1], message[2])

    def _lost(self) -> None:
        self.lost += 1


async def waiting(work: Callable[[], T]) -> T:
    """What a worker's call does: in a greenlet, so that it may wait for the parent."""
    done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    greenlet(lambda: done.set_result(work())).switch()
    return await done


@dataclass
class House:
    """A router, desks for its workers, and a clock that the test moves."""

    settings: RouterSettings | None = None
    now_s: float = 1000.0
    watch: Watch = field(default_factory=Watch)

    def __post_init__(self) -> None:
        self.router = Router(self.settings)
        self.picker = EndpointPicker(
            self.router, FeatureSettings(), self.watch, MAX_UNREAD_BYTES, clock=lambda: self.now_s
        )
        self.endpoints = EndpointDiscovery()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._workers: list[Worker] = []
        self._links: list[Link] = []
        self._desks: list[Desk] = []
        self.heard_at_once: list[int] = []

    def call(self, work: Callable[[], T]) -> T:
        """Do it where the router lives."""

        async def do() -> T:
            return work()

        return self.run(do())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def join(self, replicas: Iterable[Replica]) -> None:
        self.call(lambda: self.router.set_members(replicas, self.now_s))

    def worker(self) -> Worker:
        """One more, in the test's own loop."""
        near, far = socket.socketpair()
        self.call(lambda: self._receive(near))
        worker = Worker(far)
        self._workers.append(worker)
        return worker

    def _receive(self, end: socket.socket) -> None:
        def readable() -> None:
            messages = link.take()
            self.heard_at_once.append(len(messages))
            for message in messages:
                assert desk.hear(message)
            if link.ended:
                desk.close()
                link.close()

        link = Link(end, readable)
        desk = Desk(link, self.picker, self.endpoints)
        self._desks.append(desk)
        self._links.append(link)

    def close_links(self) -> None:
        """As the parent's death does."""

        def leave() -> None:
            for desk, link in zip(self._desks, self._links, strict=True):
                desk.close()
                link.close()

        self.call(leave)

    def close(self) -> None:
        for worker in self._workers:
            worker.parent.link.close()
        self.close_links()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
