"""Workers ask, the parent decides: the same as without workers, and without the parent the data plane does."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest
from greenlet import greenlet

from demo.wait import until
from extproc.call import UNKNOWN
from extproc.core.features import FeatureSettings, extract
from extproc.core.replica import Replica
from extproc.core.request import Request
from extproc.core.router import Router, RouterSettings
from extproc.picker import EndpointPicker, ResponseStart
from extproc.workers import words
from extproc.workers.link import Link
from extproc.workers.remote import ANSWER_LIMIT_S, Parent, Patient
from tests.support.watch import Watch
from tests.workers.house import MAX_UNREAD_BYTES, House, Worker, waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from extproc.picker import Picker, RoutedRequest
    from extproc.workers.link import Message

FLEET = [Replica(f"replica-{number}", f"10.0.0.{number}:8000") for number in range(1, 7)]
CHAT = "/v1/chat/completions"


def chat(user: int, turns: int, session: bool = True) -> Request:
    """A conversation under one of three shared system prompts."""
    opening = 5_000 if user % 5 == 0 else 200  # every fifth is long enough to be routed by its headers
    messages = [{"role": "system", "content": f"You are assistant {user % 3}. " * opening}]
    for turn in range(turns):
        messages += [{"role": "user", "content": f"{user} asks {turn}. " * 40}, {"role": "assistant", "content": "So."}]
    body = json.dumps({"model": "m", "stream": True, "messages": messages}).encode()
    headers = {"x-session-id": f"user-{user}"} if session else {}
    return Request("POST", CHAT, headers, body, content_length_bytes=len(body))


def pick(picker: Picker, request: Request, allowed: frozenset[str] | None = None) -> tuple[RoutedRequest, bool]:
    """As an exchange does: by headers, where they say enough."""
    unseen = Request(request.method, request.path, request.headers, b"", True, request.content_length_bytes)
    by_headers = picker.pick_by_headers(unseen, allowed)
    return by_headers or picker.pick(request, allowed), by_headers is not None


def started(tokens: int) -> ResponseStart:
    return ResponseStart(200, True, tokens, tokens // 2, 0, None)


async def in_flight(house: House, router: Router, told: Watch) -> None:
    """Wait until the parent has heard all that workers told it, so that it is where the other router is.

    told: what that one's observer was told.
    """

    async def same() -> bool:
        return (
            house.call(lambda: house.router.open_leases) == router.open_leases
            and len(house.watch.starts) == len(told.starts)
            and house.watch.finished_count == told.finished_count
        )

    await until(same, "the parent has heard all")
    for replica in FLEET:
        assert house.router.in_flight(replica.id) == router.in_flight(replica.id)


async def nothing_open(house: House) -> None:
    async def none() -> bool:
        return house.router.open_leases == 0

    await until(none, "no lease is open")


@pytest.mark.parametrize("settings", [RouterSettings(), RouterSettings(saturation_in_flight=8, shed=True)])
async def test_two_workers_decide_like_one_process(settings: RouterSettings) -> None:
    """Same endpoints, same requests in flight after each step, with leases that are held and released in between."""
    dice, now_s = random.Random(7), 1000.0
    router, told = Router(settings), Watch()
    alone = EndpointPicker(router, FeatureSettings(), told, max_unread_bytes=MAX_UNREAD_BYTES, clock=lambda: now_s)
    house = House(settings)
    try:
        house.join(FLEET)
        router.set_members(FLEET, now_s)
        workers = [house.worker(), house.worker()]
        held: list[tuple[RoutedRequest, RoutedRequest]] = []
        reasons, unread = set(), 0
        for step in range(300):
            now_s = house.now_s = now_s + dice.expovariate(20.0)
            what = dice.random()
            if what < 0.55 or not held:
                request = chat(dice.randrange(40), dice.randrange(1, 6), session=dice.random() < 0.7)
                allowed = frozenset({"10.0.0.2:8000", "10.0.0.3:8000"}) if dice.random() < 0.1 else None
                worker = dice.choice(workers).picker
                one, left_unread = pick(alone, request, allowed)
                two, too = await waiting(partial(pick, worker, request, allowed))
                assert left_unread == too
                unread += left_unread
                seen = (two.decision.reason, two.decision.endpoint, two.decision.retry_after_s)
                assert seen == (one.decision.reason, one.decision.endpoint, one.decision.retry_after_s), step
                assert two.decision.membership_version == one.decision.membership_version
                reasons.add(one.decision.reason)
                held.append((one, two))
            elif what < 0.75:
                for each in dice.choice(held):
                    each.response_started(started(1000 + step))
            else:
                for each in held.pop(dice.randrange(len(held))):
                    each.finish()
                    each.finish()
            await in_flight(house, router, told)
        assert len(reasons) >= 3, reasons
        assert unread > 10
        assert house.router.bytes_per_token == router.bytes_per_token
    finally:
        house.close()


async def test_observers_see_what_they_see_of_one_process(house: House) -> None:
    alone = Watch()
    router = Router()
    router.set_members(FLEET, house.now_s)
    house.join(FLEET)
    request = chat(1, 3)
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
    request = Request(request.method, request.path, {**request.headers, **trace}, request.body)
    one = EndpointPicker(router, observer=alone, clock=lambda: house.now_s).pick(request, None)
    for pick in (one, await house.worker().pick(request)):
        pick.response_started(ResponseStart(503, False, None, 7, None, "10.0.0.9:8000"))
        pick.finish()

    async def finished() -> bool:
        return house.watch.finished_count == 1

    await until(finished, "it has ended")
    ours, theirs = house.watch, alone
    assert ours.starts == theirs.starts
    (mine,), (other,) = ours.requests, theirs.requests
    assert (mine.method, mine.path) == (other.method, other.path)
    assert mine.headers == trace, "no other header leaves the worker"
    assert mine.body == b"", "nor does a prompt"
    (decision,), (single,) = ours.decisions, theirs.decisions
    assert (decision.candidates, decision.matched_bytes, decision.prompt_tokens) == (
        single.candidates,
        single.matched_bytes,
        single.prompt_tokens,
    )


@pytest.mark.parametrize(
    "request_",
    [
        Request("GET", "/health", {}),
        Request("POST", CHAT, {}, b"no JSON"),
        Request("POST", CHAT, {}, b'{"model": "\\ud800", "messages": [{"role": "user", "content": "a"}]}'),
        Request("POST", "/v1/completions", {}, b'{"prompt": "' + b"x" * 5000, True, 9000),
        Request("POST", CHAT + "?" + "q" * 100_000, {"session_id": "s"}, b"{}"),
    ],
    ids=["get", "unreadable", "surrogate", "cut", "long path"],
)
async def test_odd_requests_pass_the_link(house: House, request_: Request) -> None:
    router = Router()
    router.set_members(FLEET, house.now_s)
    house.join(FLEET)
    one = EndpointPicker(router, clock=lambda: house.now_s).pick(request_, None).decision
    two = (await house.worker().pick(request_)).decision
    assert (two.reason, two.endpoint) == (one.reason, one.endpoint)


async def test_a_worker_that_dies_leaves_no_lease(house: House) -> None:
    house.join(FLEET)
    dying, living = house.worker(), house.worker()
    for number in range(20):
        await dying.pick(chat(number, 1))
    kept = await living.pick(chat(99, 1))
    assert house.router.open_leases == 21
    dying.parent.link.close()

    async def released() -> bool:
        return house.router.open_leases == 1

    await until(released, "the dead worker's leases are released")
    assert house.watch.finished_count == 20
    kept.finish()
    await nothing_open(house)


async def test_a_parent_that_dies_is_noticed(house: House) -> None:
    house.join(FLEET)
    worker = house.worker()
    assert (await worker.pick(chat(1, 1))).decision.endpoint is not None
    house.close_links()

    async def lost() -> bool:
        return worker.lost == 1

    pick = await worker.pick(chat(1, 2))
    assert (pick.decision.endpoint, pick.decision.membership_version) == (None, 0)
    await until(lost, "the worker knows")
    pick.finish()
    assert (await worker.pick(chat(1, 2))).decision.endpoint is None
    assert worker.lost == 1


class Silence:
    """A parent that stands still between `begin` and `end`."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._over = threading.Event()

    def begin(self) -> None:
        standing = threading.Event()

        def stand_still() -> None:
            standing.set()
            self._over.wait(30)

        self._house.loop.call_soon_threadsafe(stand_still)
        assert standing.wait(10)

    def end(self) -> None:
        self._over.set()


@pytest.fixture
def silence(house: House) -> Iterator[Silence]:
    silence = Silence(house)
    yield silence
    silence.end()


async def test_any_word_of_the_parent_ends_its_silence() -> None:
    """The answer that was waited for may never come: nobody asks meanwhile, so there is no other."""
    ours, theirs = socket.socketpair()
    heard: list[Message] = []
    answers: list[Message | None] = []
    asked: list[Message] = []
    parent = Parent(ours, heard.append, lambda: None)
    other = Link(theirs, lambda: asked.extend(other.take()))

    def ask(number: int) -> None:
        greenlet(lambda: answers.append(parent.ask(number, (words.QUESTION, number)))).switch()

    async def holds(condition: Callable[[], bool], what: str) -> None:
        async def held() -> bool:
            return condition()

        await until(held, what)

    ask(1)
    await holds(lambda: answers == [None], "nobody has answered")
    ask(2)
    assert answers == [None, None], "it is not asked"
    other.post((words.PING,))
    await holds(lambda: heard == [(words.PING,)], "it has said something")
    ask(3)
    await holds(lambda: asked == [(words.QUESTION, 1), (words.QUESTION, 3)], "it is asked again")
    parent.link.close()
    other.close()


async def test_a_parent_that_stands_still_is_waited_for_once(house: House, silence: Silence) -> None:
    """Then requests go unrouted at once, until it answers again; and none of them leaves a lease."""
    house.join(FLEET)
    worker = house.worker()
    open_ = await worker.pick(chat(0, 1))
    silence.begin()
    began_s = time.monotonic()
    assert (await worker.pick(chat(1, 1))).decision.membership_version == 0
    waited_s = time.monotonic() - began_s
    assert ANSWER_LIMIT_S <= waited_s < 2 * ANSWER_LIMIT_S
    for number in range(50):
        assert (await worker.pick(chat(number, 1))).decision.endpoint is None
    assert time.monotonic() - began_s - waited_s < 1.0, "50 more did not wait"
    open_.finish()
    silence.end()

    async def routed() -> bool:
        pick = await worker.pick(chat(1, 1))
        pick.finish()
        return pick.decision.endpoint is not None

    await until(routed, "it is asked again")
    await nothing_open(house)


async def test_a_question_that_fails_costs_its_request_the_route_only(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.join(FLEET)
    worker = house.worker()
    answer = await waiting(lambda: worker.parent.ask(1_000_000, (words.QUESTION, 1_000_000, "no more")))
    assert answer is not None
    decision = words.read_answer(answer)
    assert decision is not None
    assert (decision.endpoint, decision.membership_version) == (None, 0)
    assert "a decision failed" in caplog.text
    assert (await worker.pick(chat(1, 1))).decision.endpoint is not None


async def test_questions_of_one_turn_travel_together_and_are_answered_each(house: House) -> None:
    house.join(FLEET)
    worker = house.worker()
    picks = await asyncio.gather(*(worker.pick(chat(number, 1)) for number in range(50)))
    assert max(house.heard_at_once) == 50
    assert house.router.open_leases == 50
    alone = Router()
    alone.set_members(FLEET, house.now_s)
    picker = EndpointPicker(alone, clock=lambda: house.now_s)
    assert [each.decision.endpoint for each in picks] == [
        picker.pick(chat(number, 1), None).decision.endpoint for number in range(50)
    ]


class Answering:
    """A call's way back."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    def send(self, message: bytes) -> None:
        raise AssertionError

    def end(self, status: int = 0, message: str = "") -> None:
        self.ended.append(status)


class Waiting:
    """A call that waits for the parent at each message, and writes down what it was told."""

    def __init__(self, worker: Worker) -> None:
        self.told: list[str] = []
        self._worker = worker

    def received(self, message: bytes) -> None:
        self.told.append(f"{message.decode()} begins")
        self._worker.picker.pick(chat(1, 1), None).finish()
        if message == b"fault":
            raise RuntimeError("a fault")
        self.told.append(f"{message.decode()} ends")

    def half_closed(self) -> None:
        self.told.append("half closed")

    def closed(self) -> None:
        self.told.append("closed")


async def test_a_call_that_waits_is_told_all_else_afterwards(house: House) -> None:
    house.join(FLEET)
    call, answering = Waiting(house.worker()), Answering()
    patient = Patient(call, answering)
    patient.received(b"one")
    patient.received(b"two")
    patient.half_closed()
    patient.closed()
    assert call.told == ["one begins"]

    async def over() -> bool:
        return call.told[-1] == "closed"

    await until(over, "it is over")
    assert call.told == ["one begins", "one ends", "two begins", "two ends", "half closed", "closed"]
    assert answering.ended == []
    await nothing_open(house)


async def test_a_fault_after_waiting_ends_its_call_only(house: House, caplog: pytest.LogCaptureFixture) -> None:
    house.join(FLEET)
    worker = house.worker()
    call, other, answering = Waiting(worker), Waiting(worker), Answering()
    faulty, sound = Patient(call, answering), Patient(other, answering)
    faulty.received(b"fault")
    sound.received(b"one")
    faulty.closed()

    async def over() -> bool:
        return call.told[-1] == "closed" and other.told[-1] == "one ends"

    await until(over, "both are over")
    assert answering.ended == [UNKNOWN]
    assert "a fault" in caplog.text


def test_feature_settings_pass_whole() -> None:
    settings = FeatureSettings(session_headers=("X_Mine",), mask=("uuid",), mask_patterns=(r"nonce=\d+",), secret="s")
    received = words.read_features(words.features(settings))
    assert received == settings
    assert received.masking is not None
    request = Request("POST", CHAT, {}, b'{"messages": [{"role": "user", "content": "nonce=17 hello"}]}')
    other = Request("POST", CHAT, {}, b'{"messages": [{"role": "user", "content": "nonce=18 hello"}]}')
    assert extract(request, received).conversation_key == extract(other, received).conversation_key
