"""The worker's end: a picker and an endpoint discovery that ask the parent process."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Final

from greenlet import getcurrent, greenlet

from extproc.call import UNKNOWN
from extproc.core.features import extract
from extproc.picker import known_key
from extproc.workers import words
from extproc.workers.link import Link

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable

    from extproc.call import Answering, Call
    from extproc.core.decision import Decision
    from extproc.core.features import FeatureSettings
    from extproc.core.request import Request
    from extproc.picker import ResponseStart
    from extproc.workers.link import Message

log = logging.getLogger(__name__)

ANSWER_LIMIT_S: Final = 1.0
"""How long a question waits: half of what Envoy gives each message (`envoy.message_timeout_s`)."""


class Parent:
    """The process that decides, as a worker sees it.

    heard: called with each message that is no answer. lost: called once, at the end.
    """

    def __init__(self, end: socket.socket, heard: Callable[[Message], None], lost: Callable[[], None]) -> None:
        self.link = Link(end, self._readable)
        self._heard = heard
        self._lost = lost
        self._asked: dict[int, tuple[greenlet, float]] = {}  # who waits, and until when, in the order of the questions
        self._silent = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def ask(self, number: int, question: Message) -> Message | None:
        """The answer; for a greenlet, which waits for it while the loop goes on (see `Patient`).

        None where it does not come in time, and from then on, until something comes again.
        """
        if self._silent or self.link.ended:
            return None
        current = getcurrent()
        assert current.parent is not None
        self._asked[number] = current, self._loop.time() + ANSWER_LIMIT_S
        if self._timer is None:
            self._timer = self._loop.call_later(ANSWER_LIMIT_S, self._give_up)
        self.link.post(question)
        answer: Message | None = current.parent.switch()
        return answer

    def _readable(self) -> None:
        for message in self.link.take():
            self._silent = False
            if message[0] == words.ANSWER:
                waiting = self._asked.pop(message[1], None)
                if waiting is not None:
                    waiting[0].switch(message)
            else:
                self._heard(message)
        if self.link.ended:
            self.link.close()
            self._go_without(list(self._asked))
            self._lost()

    def _give_up(self) -> None:
        """Let go those that have waited too long, and look again when the next has."""
        now_s = self._loop.time()
        late = [number for number, (_, until_s) in self._asked.items() if until_s <= now_s]
        self._silent = self._silent or bool(late)
        self._go_without(late)
        self._timer = None
        if self._asked:
            _, until_s = next(iter(self._asked.values()))
            self._timer = self._loop.call_at(until_s, self._give_up)

    def _go_without(self, numbers: list[int]) -> None:
        for number in numbers:
            waiting, _ = self._asked.pop(number)
            waiting.switch(None)


class Patient:
    """A Call that may wait for the parent, in a greenlet of its own. What comes meanwhile waits behind it."""

    def __init__(self, call: Call, answering: Answering) -> None:
        self._call = call
        self._answering = answering
        self._waits = False
        self._behind: deque[Callable[[], None]] = deque()

    def received(self, message: bytes) -> None:
        self._do(partial(self._call.received, message))

    def half_closed(self) -> None:
        self._do(self._call.half_closed)

    def closed(self) -> None:
        self._do(self._call.closed)

    def _do(self, work: Callable[[], None]) -> None:
        self._behind.append(work)
        if not self._waits:
            greenlet(self._work).switch()

    def _work(self) -> None:
        self._waits = True
        while self._behind:
            try:
                self._behind.popleft()()
            except Exception:
                log.exception("a call failed")
                self._answering.end(UNKNOWN, "internal error")
        self._waits = False


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
            self._parent.link.post_later(words.started(self._number, start))

    def finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._parent.link.post_later((words.FINISHED, self._number))


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
