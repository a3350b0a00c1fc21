"""The parent's end of one worker's link: its questions are answered here, and its leases are held."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from extproc.workers import words

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from extproc.eds import EndpointDiscovery
    from extproc.picker import EndpointPicker, Pick
    from extproc.workers.link import Link, Message

log = logging.getLogger(__name__)


class Desk:
    """What the parent does for one worker, as if Envoy had come to it."""

    def __init__(self, link: Link, picker: EndpointPicker, endpoints: EndpointDiscovery) -> None:
        self._link = link
        self._picker = picker
        self._endpoints = endpoints
        self._picks: dict[int, Pick] = {}
        self._requests: dict[int, asyncio.Queue[bytes]] = {}
        self._streams: dict[int, asyncio.Task[None]] = {}

    @property
    def open_picks(self) -> int:
        """Requests of the worker that have not ended."""
        return len(self._picks)

    def hear(self, message: Message) -> bool:
        """False: it is none for the desk."""
        kind = message[0]
        if kind in {words.QUESTION, words.BY_HEADERS}:
            self._answer(message)
        elif kind == words.STARTED:
            if (pick := self._picks.get(message[1])) is not None:
                pick.response_started(words.read_started(message))
        elif kind == words.FINISHED:
            if (pick := self._picks.pop(message[1], None)) is not None:
                pick.finish()
        elif kind == words.DISCOVERY:
            self._discovery(message[1]).put_nowait(message[2])
        elif kind == words.DISCOVERY_ENDED:
            self._requests.pop(message[1], None)
            if (stream := self._streams.pop(message[1], None)) is not None:
                stream.cancel()
        else:
            return False
        return True

    def close(self) -> None:
        """The worker is gone: its requests have ended, as far as can be known. Idempotent."""
        for pick in self._picks.values():
            pick.finish()
        self._picks.clear()
        for stream in self._streams.values():
            stream.cancel()
        self._streams.clear()
        self._requests.clear()

    def _answer(self, message: Message) -> None:
        number = message[1]
        try:
            pick = self._route(message)
        except Exception:
            log.exception("a decision failed")
            self._link.post(words.answer(number, words.unanswered()))
            return
        if pick is None:
            self._link.post((words.ANSWER, number))
            return
        self._picks[number] = pick
        self._link.post(words.answer(number, pick.decision))

    def _route(self, message: Message) -> Pick | None:
        if message[0] == words.QUESTION:
            return self._picker.route(*words.read_question(message)[1:])
        return self._picker.route_known(*words.read_question_by_headers(message)[1:])

    def _discovery(self, number: int) -> asyncio.Queue[bytes]:
        """The requests of an Envoy's stream; the first begins it."""
        if number not in self._requests:
            requests = self._requests[number] = asyncio.Queue()
            self._streams[number] = asyncio.create_task(self._discover(number, requests))
        return self._requests[number]

    async def _discover(self, number: int, requests: asyncio.Queue[bytes]) -> None:
        try:
            async for response in self._endpoints.serve(_each(requests)):
                self._link.post((words.ENDPOINTS, number, response))
        finally:
            self._link.post((words.ENDPOINTS, number, None))


async def _each(requests: asyncio.Queue[bytes]) -> AsyncIterator[bytes]:
    while True:
        yield await requests.get()
