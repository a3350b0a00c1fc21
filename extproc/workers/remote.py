"""The worker's end: a picker and an endpoint discovery that ask the parent process."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Final

from extproc.core.features import extract
from extproc.picker import known_key
from extproc.workers import words
from extproc.workers.link import Link

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable

    from extproc.core.decision import Decision
    from extproc.core.features import FeatureSettings
    from extproc.core.request import Request
    from extproc.picker import ResponseStart
    from extproc.workers.link import Message

ANSWER_LIMIT_S: Final = 1.0
"""A worker stands still while it waits: half of what Envoy gives each message (`envoy.message_timeout_s`)."""


class Parent:
    """The process that decides, as a worker sees it.

    heard: called with each message that is no answer, in order, on the running loop. lost: called once, at the end.
    """

    def __init__(self, end: socket.socket, heard: Callable[[Message], None], lost: Callable[[], None]) -> None:
        self.link = Link(end, ANSWER_LIMIT_S)
        self._heard = heard
        self._lost = lost
        self._awaited: int | None = None
        self._answer: Message | None = None
        self._inbox: deque[Message] = deque()
        self._over = False
        self._loop = asyncio.get_running_loop()
        self.link.follow(self._take)

    def ask(self, number: int, question: Message) -> Message | None:
        """Blocks for the answer. None where none came in time, or one to an earlier question is still to come."""
        if self._awaited is not None:
            self._take()
        if self._awaited is not None or self.link.ended:
            return None
        self._awaited = number
        until_s = monotonic() + ANSWER_LIMIT_S
        self.link.send(question)
        while self._awaited is not None and not self.link.ended:
            self._sort(self.link.wait())
            if self._awaited is not None and monotonic() >= until_s:
                return None
        return self._answer if self._awaited is None else None

    def _take(self) -> None:
        self._sort(self.link.take())

    def _sort(self, messages: list[Message]) -> None:
        """The answer is for who waits for it, all else for the loop to tell in its order."""
        for message in messages:
            if message[0] != words.ANSWER:
                self._inbox.append(message)
            elif message[1] == self._awaited:
                self._awaited, self._answer = None, message
        if self._inbox or self.link.ended:
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        while self._inbox:
            self._heard(self._inbox.popleft())
        if self.link.ended and not self._over:
            self._over = True
            self.link.close()
            self._lost()


class RemotePicker:
    """A Picker that reads requests here and has the parent decide. `feature_settings` may be replaced."""

    def __init__(self, parent: Parent, feature_settings: FeatureSettings, max_unread_bytes: int = 0) -> None:
        self.feature_settings = feature_settings
        self._max_unread_bytes = max_unread_bytes
        self._parent = parent
        self._numbers = count(1)

    def pick(self, request: Request, allowed_endpoints: frozenset[str] | None) -> RemotePick:
        """Route one request, or let it go unrouted where the parent does not answer."""
        began_s = monotonic()
        features = extract(request, self.feature_settings)
        number = next(self._numbers)
        asked = words.question(number, request, features, allowed_endpoints, monotonic() - began_s)
        pick = self._ask(number, asked)
        assert pick is not None  # of a request that has been read the parent can always say where it goes
        return pick

    def pick_by_headers(self, request: Request, allowed_endpoints: frozenset[str] | None) -> RemotePick | None:
        """Route one whose body has not been seen, if it is a long one of a session that the parent knows."""
        began_s = monotonic()
        key = known_key(request, self.feature_settings, self._max_unread_bytes)
        if key is None:
            return None
        number = next(self._numbers)
        return self._ask(
            number, words.question_by_headers(number, request, key, allowed_endpoints, monotonic() - began_s)
        )

    def _ask(self, number: int, question: Message) -> RemotePick | None:
        """None where the parent can't say by this question; unrouted where it does not answer."""
        answer = self._parent.ask(number, question)
        if answer is None:
            # The question may be in the parent's hands, and the lease will be taken then.
            pick = RemotePick(self._parent, number, words.unanswered())
            pick.finish()
            return pick
        decision = words.read_answer(answer)
        return RemotePick(self._parent, number, decision) if decision is not None else None


class RemotePick:
    """A RoutedRequest whose lease the parent holds."""

    __slots__ = ("_finished", "_number", "_parent", "decision")

    def __init__(self, parent: Parent, number: int, decision: Decision) -> None:
        self.decision = decision
        self._parent = parent
        self._number = number
        self._finished = False

    def response_started(self, start: ResponseStart) -> None:
        if not self._finished:
            self._parent.link.post(words.started(self._number, start))

    def finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._parent.link.post((words.FINISHED, self._number))


class RemoteDiscovery:
    """Endpoint discovery streams that are the parent's; here their bytes pass through."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._numbers = count(1)
        self._responses: dict[int, asyncio.Queue[bytes | None]] = {}

    async def serve(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """See EndpointDiscovery.serve."""
        number = next(self._numbers)
        responses = self._responses[number] = asyncio.Queue()
        reader = asyncio.create_task(self._forward(number, requests))
        try:
            while (response := await responses.get()) is not None:
                yield response
        finally:
            reader.cancel()
            del self._responses[number]
            self._parent.link.post((words.DISCOVERY_ENDED, number))

    async def _forward(self, number: int, requests: AsyncIterator[bytes]) -> None:
        async for request in requests:
            self._parent.link.post((words.DISCOVERY, number, request))
        self.respond(number, None)

    def respond(self, number: int, response: bytes | None) -> None:
        """The parent said this for one of the streams; None: its end."""
        responses = self._responses.get(number)
        if responses is not None:
            responses.put_nowait(response)

    async def close(self) -> None:
        """End all streams."""
        for number in self._responses:
            self.respond(number, None)
