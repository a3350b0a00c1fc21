"""The parent's port and its workers: started, fed with connections, watched and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, Final

import structlog

from extproc.port import Port
from extproc.server import certificates, check_free
from extproc.workers import words
from extproc.workers.desk import Desk
from extproc.workers.link import Link

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.core.features import FeatureSettings
    from extproc.eds import EndpointDiscovery
    from extproc.picker import EndpointPicker
    from extproc.server import ServerSettings

PING_S: Final = 1.0
STARTING_PINGS: Final = 30
"""A worker serves within a second of its start; on a machine that is very busy, later."""
SILENT_PINGS: Final = 5
"""A worker that has not answered so many is frozen: Envoy's requests on its connections wait for nothing. The longest
that one is rightly busy is some 50 ms (extproc/core/document.py)."""
SHORT_LIFE_S: Final = 10.0
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
"""Before the next start of a worker that had a short life, doubled each time from the first."""
END_S: Final = 2.0
"""From a worker's last word, or past the drain, to its end."""

log = structlog.get_logger(__name__)


class WorkerProcess:
    """One worker as its parent sees it, from its start to its end.

    errors: takes in its streams' errors. began: called when it takes connections.
    serving: it does. gone: its link is down, so that it is dead or dying. leases_left: those it had then.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        end: socket.socket,
        picker: EndpointPicker,
        endpoints: EndpointDiscovery,
        errors: Counter[str],
        began: Callable[[], None],
    ) -> None:
        self.process = process
        self.link = Link(end, self._readable)
        self.started_s = monotonic()
        self.serving = False
        self.gone = asyncio.Event()
        self.leases_left = 0
        self._desk = Desk(self.link, picker, endpoints)
        self._errors = errors
        self._began = began
        self._given = 0
        self._told = words.Alive(0, 0, 0, {})
        self._pings = 0

    @property
    def connections(self) -> tuple[int, int]:
        """(those that carry load, all). One that it was just given may turn out to be either."""
        new = self._given - self._told.taken
        return self._told.busy + new, self._told.open + new

    def give(self, connection: socket.socket) -> None:
        self._given += 1
        self.link.post((words.CONNECTION,), connection)

    def ping(self) -> None:
        """Ask for a sign of life; kill a worker that gave none for too long."""
        if self._pings >= (SILENT_PINGS if self.serving else STARTING_PINGS):
            log.error("worker does not answer", pid=self.process.pid)
            self.kill()
            return
        self._pings += 1
        self.link.post((words.PING,))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def release(self) -> None:
        """What it held is free. Idempotent."""
        if self.gone.is_set():
            return
        self.serving = False
        self.leases_left = self._desk.open_picks
        self._desk.close()
        self.link.close()
        self.gone.set()

    def _readable(self) -> None:
        for message in self.link.take():
            try:
                if not self._desk.hear(message):
                    self._hear_alive(words.read_alive(message))
            except Exception:  # of one request; those behind it are others'
                log.exception("a worker's message failed")
        if self.link.ended:
            self.release()

    def _hear_alive(self, state: words.Alive) -> None:
        self._pings = 0
        for kind, count in state.stream_errors.items():
            self._errors[kind] += count - self._told.stream_errors.get(kind, 0)
        self._told = state
        if not self.serving:
            self.serving = True
            log.info("worker serving", pid=self.process.pid)
            self._began()


class Supervisor:
    """Serves from `start` to `stop`, as extproc.server.Server does, by workers.

    stream_errors: ext_proc streams that broke off, by kind, those of workers that died among them.
    """

    def __init__(self, settings: ServerSettings, picker: EndpointPicker, endpoints: EndpointDiscovery) -> None:
        self.stream_errors = Counter({"unknown_message": 0, "fault": 0, "worker": 0})
        self._settings = settings
        self._picker = picker
        self._endpoints = endpoints
        self._ready = False
        self._leaving = asyncio.Event()
        self._workers: list[WorkerProcess] = []
        self._serving = asyncio.Event()
        self._port = Port(self._hand_over)
        self._tasks: list[asyncio.Task[None]] = []

    # --- as a server ---

    async def start(self) -> str:
        """Begin to serve; returns the address really bound. Raises RuntimeError where it cannot be, or TLS cannot."""
        settings = self._settings
        check_free(settings.listen)
        if settings.tls_certificate:
            try:
                certificates(settings).contexts()
            except ValueError as error:
                raise RuntimeError(f"server.{error}") from error
        try:
            bound = self._port.listen(settings.listen)
        except OSError as error:
            raise RuntimeError(f"cannot listen on {settings.listen}: {error.strerror or error}") from error
        self._tasks = [asyncio.create_task(self._keep()) for _ in range(settings.workers)]
        self._tasks.append(asyncio.create_task(self._watch()))
        try:
            async with asyncio.timeout(STARTING_PINGS * PING_S):
                await self._serving.wait()
        except TimeoutError:
            await self._end()
            raise RuntimeError("no worker could be started") from None
        return bound

    def set_ready(self, ready: bool) -> None:
        """Say whether the fleet is known. While it is not, Envoy routes by its own fallback."""
        self._ready = ready
        for worker in self._workers:
            worker.link.post((words.READY, ready))

    def set_features(self, settings: FeatureSettings) -> None:
        """From now on read requests so."""
        for worker in self._workers:
            worker.link.post(words.features(settings))

    async def stop(self) -> None:
        """Leave gracefully: not ready, then no new streams, then the end of the open ones within `drain_s`."""
        self.set_ready(False)
        await asyncio.sleep(self._settings.notice_s)
        await self._endpoints.close()
        self._leaving.set()
        self._port.close()
        for worker in self._workers:
            worker.link.post((words.LEAVE,))
        await asyncio.wait(self._tasks[:-1], timeout=self._settings.drain_s + END_S)
        await self._end()

    # --- workers ---

    async def _end(self) -> None:
        self._leaving.set()
        self._port.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self) -> None:
        """One place: a worker, and when it has died the next."""
        pause_s = 0.0
        while not self._leaving.is_set():
            try:
                worker = await self._begin()
            except OSError as error:
                log.error("worker not started", error=str(error))
                lived_s = 0.0
            else:
                await self._outlive(worker)
                lived_s = monotonic() - worker.started_s
            pause_s = 0.0 if lived_s > SHORT_LIFE_S else min(LONGEST_PAUSE_S, pause_s * 2 or FIRST_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._leaving.wait()

    async def _begin(self) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            try:
                # In a group of its own: what a terminal sends is for the parent.
                # And of the same program: not of one that lies in the directory where this one was started.
                argv = (sys.executable, "-P", "-m", "extproc.workers", str(descriptor))
                path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
                process = await asyncio.create_subprocess_exec(
                    *argv, pass_fds=(descriptor,), process_group=0, env={**os.environ, **path}
                )
            except BaseException:
                ours.close()
                raise
        picker = self._picker
        worker = WorkerProcess(process, ours, picker, self._endpoints, self.stream_errors, self._serving.set)
        self._workers.append(worker)
        worker.link.post(words.start(words.Start(self._settings, picker.feature_settings, picker.max_unread_bytes)))
        worker.link.post((words.READY, self._ready))
        if self._leaving.is_set():
            worker.link.post((words.LEAVE,))
        return worker

    async def _outlive(self, worker: WorkerProcess) -> None:
        """Wait for its end, and see to it that it is one."""
        try:
            await worker.gone.wait()
            async with asyncio.timeout(END_S):
                await worker.process.wait()
        except TimeoutError:
            pass
        finally:
            worker.kill()
            worker.release()
            self._workers.remove(worker)
        status = await worker.process.wait()
        if not self._leaving.is_set():
            self.stream_errors["worker"] += worker.leases_left
            log.error("worker ended", pid=worker.process.pid, status=status, leases=worker.leases_left)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            self._level()
            for worker in self._workers:
                worker.ping()

    # --- connections ---

    async def _hand_over(self, connection: socket.socket) -> None:
        """To the worker that has the least; where none serves, when one does."""
        while not (serving := [each for each in self._workers if each.serving]):
            self._serving.clear()
            await self._serving.wait()
        min(serving, key=lambda each: each.connections).give(connection)

    def _level(self) -> None:
        """A worker that has just been started would get nothing while Envoys keep the connections that they have."""
        serving = sorted((each for each in self._workers if each.serving), key=lambda each: each.connections)
        if serving and serving[-1].connections[0] - serving[0].connections[0] > 1:
            serving[-1].link.post((words.SEND_AWAY,))
