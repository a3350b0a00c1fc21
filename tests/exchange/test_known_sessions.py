"""Long bodies of known sessions: the exchange routes them by their headers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from extproc.core.features import FeatureSettings
from extproc.core.replica import Replica
from extproc.messages import (
    BodyMode,
    Continue,
    Phase,
    Refuse,
    Reply,
    RequestBody,
    RequestHeaders,
    ResponseHeaders,
    Route,
)
from tests.exchange.conftest import ENDPOINT, Desk

JSON = {"content-type": "application/json"}
SEND_BODY = Continue(Phase.REQUEST_HEADERS)
UNREAD = Route(Phase.REQUEST_HEADERS, ENDPOINT, without_body=True)


def chat(length: int, stream: bool = False) -> bytes:
    """A dialogue of about this length; of two lengths close to each other the longer continues the shorter."""
    turns = [{"role": "user", "content": "x" * (length - length % 10_000)}, {"role": "assistant", "content": "Go on."}]
    return json.dumps(
        {"model": "m", "stream": stream, "messages": [*turns, {"role": "user", "content": "x" * (length % 10_000)}]}
    ).encode()


def opening(length: int, mode: BodyMode = BodyMode.BUFFERED, session: str = "s") -> RequestHeaders:
    headers = {":method": "POST", ":path": "/v1/chat/completions", "content-length": str(length)}
    return RequestHeaders({**headers, "x-session-id": session}, False, mode)


def turn(desk: Desk, length: int, answer: dict[str, str] | None = None) -> Reply:
    """One request and its answer; what is replied to its headers."""
    exchange, body = desk.exchange(), chat(length)
    (reply,) = exchange.receive(opening(len(body)))
    assert exchange.receive(RequestBody(body, end_of_stream=True)) == (
        [Continue(Phase.REQUEST_BODY)] if isinstance(reply, Route) else [Route(Phase.REQUEST_BODY, ENDPOINT)]
    )
    exchange.receive(ResponseHeaders(answer or {":status": "200"}))
    assert desk.router.open_leases == 1
    exchange.close()
    assert desk.router.open_leases == 0
    return reply


def test_from_its_second_turn_on(desk: Desk) -> None:
    """Also where the data plane sends the body all the same, as `turn` does."""
    assert [turn(desk, 70_000 + number) for number in range(4)] == [SEND_BODY, UNREAD, UNREAD, UNREAD]
    assert [len(request.body) > 0 for request in desk.watch.requests] == [True, False, False, False]


@pytest.mark.parametrize(("cached", "then"), [("17000", UNREAD), ("8000", SEND_BODY), ("junk", UNREAD)])
def test_until_an_engine_tells_that_it_held_little_of_it(desk: Desk, cached: str, then: Reply) -> None:
    answer = {":status": "200", "x-prompt-tokens": "17500", "x-cached-tokens": cached}
    assert [turn(desk, 70_000 + number, answer=answer) for number in range(3)] == [SEND_BODY, UNREAD, then]


def test_an_answer_that_is_no_stream_says_nothing_of_the_prefill(desk: Desk) -> None:
    """Though the turn that was read asked for a stream."""
    speeds = []
    for number, answer in enumerate(({"content-type": "text/event-stream", "x-queue-depth": "0"}, JSON)):
        exchange, body = desk.exchange(), chat(70_000 + number, stream=True)
        exchange.receive(opening(len(body)))
        exchange.receive(RequestBody(body, end_of_stream=True))
        desk.now_s += 7.0
        told = {"x-prompt-tokens": "17500", "x-cached-tokens": "0"}
        exchange.receive(ResponseHeaders({":status": "200", **answer, **told}))
        exchange.close()
        (load,) = desk.router.loads.values()
        speeds.append(load.prefill_tokens_per_s)
    assert desk.watch.requests[-1].body == b""
    assert speeds[0] == speeds[1]


def test_short_and_very_long_ones_are_read(desk: Desk) -> None:
    assert {turn(desk, 8_000) for _ in range(4)} == {SEND_BODY}
    assert {turn(desk, 1 << 20) for _ in range(4)} == {SEND_BODY}


def test_one_that_does_not_say_its_length_is_read(desk: Desk) -> None:
    for _ in range(3):
        turn(desk, 70_000)
    said = opening(len(chat(70_000)))
    silent = replace(said, headers={name: text for name, text in said.headers.items() if name != "content-length"})
    assert desk.exchange().receive(silent) == [SEND_BODY]
    assert desk.exchange().receive(said) == [UNREAD]


def test_all_are_read_if_so_configured(desk: Desk) -> None:
    desk.picker.feature_settings = FeatureSettings(unread_from_bytes=0)
    assert {turn(desk, 70_000) for _ in range(4)} == {SEND_BODY}


def test_all_are_read_where_another_model_would_mean_other_replicas(desk: Desk) -> None:
    for _ in range(2):
        turn(desk, 70_000)
    others = Replica("b", "10.0.0.2:1", models=frozenset({"other"}))
    desk.router.set_members([Replica("a", ENDPOINT, models=frozenset({"m"})), others], desk.now_s)
    assert turn(desk, 70_000) == SEND_BODY


def test_a_refusal_needs_no_body_either(saturated: Desk) -> None:
    saturated.router.replace_settings(replace(saturated.router.settings, saturation_in_flight=1), saturated.now_s)
    turn(saturated, 70_000)
    for _ in range(2):
        saturated.exchange().receive(RequestHeaders({":method": "GET"}, end_of_stream=True))
    (reply,) = saturated.exchange().receive(opening(len(chat(70_000))))
    assert isinstance(reply, Refuse)


def test_a_data_plane_that_streams_bodies_is_routed_as_before(desk: Desk) -> None:
    turn(desk, 70_000)
    assert desk.exchange().receive(opening(70_100, BodyMode.FULL_DUPLEX_STREAMED)) == []
    assert desk.exchange().receive(opening(70_100, BodyMode.NONE)) == [Route(Phase.REQUEST_HEADERS, ENDPOINT)]
