"""A worker: the gRPC port's services on connections that the parent hands over."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from extproc.server import Server
from extproc.services import EXTERNAL_PROCESSOR
from extproc.workers import words
from extproc.workers.remote import Parent, Patient, RemoteDiscovery, RemotePicker

if TYPE_CHECKING:
    import socket
    from collections.abc import Coroutine

    from extproc.http2.listener import Peer
    from extproc.server import ServerSettings
    from extproc.workers.link import Message

NOT_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Terminals and process managers may send them to all processes of a service; the parent says what they mean."""

BUSY_STREAMS: Final = 5
"""Begun between two looks by a connection that carries load: health checks begin one, endpoint discovery none."""

log = logging.getLogger(__name__)


class WorkerServer(Server):
    """A server whose ext_proc streams may wait for the parent."""

    def __init__(self, settings: ServerSettings, picker: RemotePicker, discovery: RemoteDiscovery) -> None:
        super().__init__(settings, picker, discovery)
        path = f"/{EXTERNAL_PROCESSOR}/Process"
        process = self._services[path]
        self._services[path] = lambda answering, metadata: Patient(process(answering, metadata), answering)


class Worker:
    """Serves until its parent has it leave, or is gone. Make it inside a running event loop."""

    def __init__(self, end: socket.socket) -> None:
        self._ended = asyncio.Event()
        self._parent = Parent(end, self._hear, self._ended.set)
        self._link = self._parent.link
        self._discovery = RemoteDiscovery(self._parent)
        self._taken = 0
        self._begun: dict[Peer, int] = {}
        self._pace: dict[Peer, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        for number in NOT_OURS:
            signal.signal(number, signal.SIG_IGN)
        await self._ended.wait()
        self._link.close()

    def _hear(self, message: Message) -> None:
        match message[0]:
            case words.START:
                self._start(message)
            case words.ENDPOINTS:
                self._discovery.respond(message[1], message[2])
            case words.CONNECTION:
                self._taken += 1
                if (connection := self._link.socket()) is not None:
                    self._begin(self._listener.serve(connection))
                else:
                    log.error("a connection was lost: no descriptor is left")
            case words.READY:
                self._server.set_ready(message[1])
            case words.FEATURES:
                self._picker.feature_settings = words.read_features(message)
            case words.PING:
                self._tell_alive()
            case words.SEND_AWAY:
                if self._pace:
                    max(self._pace, key=self._pace.__getitem__).send_away()
            case words.LEAVE:
                self._begin(self._leave())

    def _start(self, message: Message) -> None:
        settings, features, max_unread_bytes = words.read_start(message)
        self._picker = RemotePicker(self._parent, features, max_unread_bytes)
        # The parent has given notice before it has anyone leave.
        self._server = WorkerServer(replace(settings, notice_s=0.0), self._picker, self._discovery)
        try:
            self._listener = self._server.open()
        except RuntimeError as error:
            log.error("%s", error)
            self._ended.set()
            return
        self._tell_alive()

    def _tell_alive(self) -> None:
        peers = self._listener.peers
        begun = {peer: peer.connection.streams_begun for peer in peers}
        self._pace = {
            peer: count - self._begun.get(peer, 0) for peer, count in begun.items() if not peer.connection.sent_away
        }
        self._begun = begun
        busy = sum(count >= BUSY_STREAMS for count in self._pace.values())
        state = words.Alive(self._taken, len(peers), busy, dict(self._server.stream_errors))
        self._link.post(words.alive(state))

    async def _leave(self) -> None:
        await self._server.stop()
        self._ended.set()

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
