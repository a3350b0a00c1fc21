"""The exchange as a table: what the data plane sends, what it is answered."""

from __future__ import annotations

import itertools
import json

import pytest

from extproc.exchange import Exchange
from extproc.messages import (
    BodyMode,
    Continue,
    Echo,
    Event,
    Phase,
    Refuse,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Route,
)
from tests.exchange.conftest import ENDPOINT, Desk

CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
POST = {":method": "POST", ":path": "/v1/chat/completions", "content-length": str(len(CHAT))}
GET = {":method": "GET", ":path": "/v1/models"}
OK = {":status": "200", "content-type": "application/json"}

ROUTE_HEADERS = Route(Phase.REQUEST_HEADERS, ENDPOINT)
ROUTE_BODY = Route(Phase.REQUEST_BODY, ENDPOINT)
GO_HEADERS = Continue(Phase.REQUEST_HEADERS)
GO_BODY = Continue(Phase.REQUEST_BODY)
GO_TRAILERS = Continue(Phase.REQUEST_TRAILERS)
GO_RESPONSE = Continue(Phase.RESPONSE_HEADERS)


def headers(mode: BodyMode, end: bool = False, extra: dict[str, str] | None = None) -> RequestHeaders:
    return RequestHeaders({**POST, **(extra or {})}, end_of_stream=end, request_body_mode=mode)


def said(exchange: Exchange, *events: Event) -> list[list[Reply]]:
    return [exchange.receive(event) for event in events]


WHOLE = RequestBody(CHAT, end_of_stream=True)
BEGUN = RequestBody(CHAT[:10], end_of_stream=False)
REST = RequestBody(CHAT[10:], end_of_stream=True)
NO_MORE = RequestBody(b"", end_of_stream=True)

CONVERSATIONS: dict[str, tuple[list[Event], list[list[Reply]]]] = {
    "headers only": ([headers(BodyMode.BUFFERED, end=True)], [[ROUTE_HEADERS]]),
    "no body is sent": ([headers(BodyMode.NONE)], [[ROUTE_HEADERS]]),
    "buffered": ([headers(BodyMode.BUFFERED), WHOLE], [[GO_HEADERS], [ROUTE_BODY]]),
    "buffered, empty": ([headers(BodyMode.BUFFERED), NO_MORE], [[GO_HEADERS], [ROUTE_BODY]]),
    "buffered, trailers after the body": (
        [headers(BodyMode.BUFFERED), RequestBody(CHAT, end_of_stream=False), RequestTrailers()],
        [[GO_HEADERS], [ROUTE_BODY], [GO_TRAILERS]],
    ),
    "buffered, trailers and no body": (
        [headers(BodyMode.BUFFERED), RequestTrailers()],
        [[GO_HEADERS], [Route(Phase.REQUEST_TRAILERS, ENDPOINT)]],
    ),
    "buffered, two body messages": (
        [headers(BodyMode.BUFFERED), WHOLE, WHOLE],
        [[GO_HEADERS], [ROUTE_BODY], [GO_BODY]],
    ),
    "partial, cut off": ([headers(BodyMode.BUFFERED_PARTIAL), BEGUN], [[GO_HEADERS], [ROUTE_BODY]]),
    "headers skipped": ([WHOLE], [[ROUTE_BODY]]),
    "headers twice": ([headers(BodyMode.NONE), headers(BodyMode.NONE)], [[ROUTE_HEADERS], [GO_HEADERS]]),
    "streamed": (
        [headers(BodyMode.STREAMED), BEGUN, REST, RequestTrailers()],
        [[ROUTE_HEADERS], [GO_BODY], [GO_BODY], [GO_TRAILERS]],
    ),
    "full duplex": (
        [headers(BodyMode.FULL_DUPLEX_STREAMED), WHOLE],
        [[], [ROUTE_HEADERS, Echo(Phase.REQUEST_BODY, CHAT, True)]],
    ),
    "full duplex, in pieces": (
        [headers(BodyMode.FULL_DUPLEX_STREAMED), BEGUN, REST],
        [[], [], [ROUTE_HEADERS, Echo(Phase.REQUEST_BODY, CHAT, True)]],
    ),
    "full duplex, the end by itself": (
        [headers(BodyMode.FULL_DUPLEX_STREAMED), RequestBody(CHAT, end_of_stream=False), NO_MORE],
        [[], [], [ROUTE_HEADERS, Echo(Phase.REQUEST_BODY, CHAT, True)]],
    ),
    "full duplex, the end twice": (
        [headers(BodyMode.FULL_DUPLEX_STREAMED), WHOLE, NO_MORE],
        [[], [ROUTE_HEADERS, Echo(Phase.REQUEST_BODY, CHAT, True)], []],
    ),
    "full duplex, ended by trailers": (
        [headers(BodyMode.FULL_DUPLEX_STREAMED), RequestBody(CHAT, end_of_stream=False), RequestTrailers()],
        [[], [], [ROUTE_HEADERS, Echo(Phase.REQUEST_BODY, CHAT, False), GO_TRAILERS]],
    ),
    "full duplex, trailers and no body": (
        [headers(BodyMode.FULL_DUPLEX_STREAMED), RequestTrailers()],
        [[], [ROUTE_HEADERS, GO_TRAILERS]],
    ),
    "full duplex, headers only": (
        [headers(BodyMode.FULL_DUPLEX_STREAMED, end=True)],
        [[ROUTE_HEADERS]],
    ),
    "an answer before the request has ended": (
        [headers(BodyMode.BUFFERED), ResponseHeaders({":status": "413"})],
        [[GO_HEADERS], [GO_RESPONSE]],
    ),
    "every message of an answer": (
        [
            headers(BodyMode.BUFFERED, end=True),
            ResponseHeaders(OK),
            ResponseBody(b"x", end_of_stream=False),
            ResponseTrailers(),
        ],
        [
            [ROUTE_HEADERS],
            [GO_RESPONSE],
            [Continue(Phase.RESPONSE_BODY)],
            [Continue(Phase.RESPONSE_TRAILERS)],
        ],
    ),
    "an answer in full duplex": (
        [
            RequestHeaders(GET, True, BodyMode.NONE, BodyMode.FULL_DUPLEX_STREAMED),
            ResponseHeaders(OK),
            ResponseBody(b"x", end_of_stream=False),
            ResponseBody(b"y", end_of_stream=True),
            ResponseBody(b"", end_of_stream=True),
        ],
        [
            [ROUTE_HEADERS],
            [GO_RESPONSE],
            [Echo(Phase.RESPONSE_BODY, b"x", False)],
            [Echo(Phase.RESPONSE_BODY, b"y", True)],
            [],
        ],
    ),
}


@pytest.mark.parametrize(("events", "replies"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_conversation(desk: Desk, events: list[Event], replies: list[list[Reply]]) -> None:
    exchange = desk.exchange()
    assert said(exchange, *events) == replies
    exchange.close()
    assert desk.router.open_leases == 0


@pytest.mark.parametrize("cut", range(len(CHAT) + 1))
def test_a_full_duplex_body_may_be_cut_anywhere(desk: Desk, cut: int) -> None:
    pieces = RequestBody(CHAT[:cut], end_of_stream=False), RequestBody(CHAT[cut:], end_of_stream=True)
    replies = said(desk.exchange(), headers(BodyMode.FULL_DUPLEX_STREAMED), *pieces)
    assert replies == [[], [], [ROUTE_HEADERS, Echo(Phase.REQUEST_BODY, CHAT, True)]]
    assert desk.watch.requests[0].body == CHAT


def test_a_long_full_duplex_body_is_routed_by_its_head_and_passed_on(desk: Desk) -> None:
    pieces = [RequestBody(b"%d" % number * 10, end_of_stream=number == 4) for number in range(5)]
    replies = said(desk.exchange(max_head_bytes=25), headers(BodyMode.FULL_DUPLEX_STREAMED), *pieces)
    assert [len(each) for each in replies] == [0, 0, 0, 2, 1, 1]
    echoed = [reply for reply in itertools.chain(*replies) if isinstance(reply, Echo)]
    assert b"".join(echo.chunk for echo in echoed) == b"".join(piece.chunk for piece in pieces)
    assert [echo.end_of_stream for echo in echoed] == [False, False, True]
    assert desk.watch.requests[0].truncated
    assert len(desk.watch.requests[0].body) == 30


@pytest.mark.parametrize(
    ("mode", "body", "content_length", "truncated"),
    [
        (BodyMode.BUFFERED, WHOLE, len(CHAT), False),
        (BodyMode.BUFFERED, RequestBody(CHAT, end_of_stream=False), None, False),  # trailers follow
        (BodyMode.BUFFERED_PARTIAL, WHOLE, len(CHAT), False),
        (BodyMode.BUFFERED_PARTIAL, BEGUN, len(CHAT), True),
        (BodyMode.BUFFERED_PARTIAL, BEGUN, None, True),
        (BodyMode.BUFFERED_PARTIAL, RequestBody(CHAT, end_of_stream=False), len(CHAT), False),
    ],
)
def test_a_cut_off_body_is_known_as_such(
    desk: Desk, mode: BodyMode, body: RequestBody, content_length: int | None, truncated: bool
) -> None:
    length = {} if content_length is None else {"content-length": str(content_length)}
    opening = RequestHeaders({":method": "POST", ":path": "/v1/chat/completions", **length}, False, mode)
    said(desk.exchange(), opening, body)
    request = desk.watch.requests[0]
    assert (request.truncated, request.content_length_bytes) == (truncated, content_length)


def test_the_core_sees_the_request_as_it_was(desk: Desk) -> None:
    said(desk.exchange(), headers(BodyMode.BUFFERED, extra={"x-session-id": "a"}), WHOLE)
    request = desk.watch.requests[0]
    assert (request.method, request.path, request.body) == ("POST", "/v1/chat/completions", CHAT)
    assert request.headers["x-session-id"] == "a"


def test_the_data_planes_own_trace_comes_before_the_clients(desk: Desk) -> None:
    exchange = Exchange(desk.picker, trace_context={"traceparent": "envoy's"})
    said(exchange, headers(BodyMode.BUFFERED, end=True, extra={"traceparent": "the client's", "x-session-id": "a"}))
    (request,) = desk.watch.requests
    assert (request.headers["traceparent"], request.headers["x-session-id"]) == ("envoy's", "a")


@pytest.mark.parametrize("junk", ["-1", "1e3", "", " 7", "٣", "9" * 40, "0x10"])
def test_an_odd_content_length_is_none(desk: Desk, junk: str) -> None:
    said(desk.exchange(), headers(BodyMode.BUFFERED, extra={"content-length": junk}), WHOLE)
    assert desk.watch.requests[0].content_length_bytes is None


def test_only_allowed_endpoints_are_named() -> None:
    desk = Desk()
    desk.join("10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1")
    for number in range(20):
        opening = RequestHeaders(
            {**GET, "x-session-id": str(number)}, True, allowed_endpoints=frozenset({"10.0.0.2:1", "10.9.9.9:1"})
        )
        assert desk.exchange().receive(opening) == [Route(Phase.REQUEST_HEADERS, "10.0.0.2:1")]


def test_no_allowed_endpoint_is_503(desk: Desk) -> None:
    exchange = desk.exchange()
    opening = RequestHeaders(GET, True, allowed_endpoints=frozenset())
    (reply,) = exchange.receive(opening)
    assert isinstance(reply, Refuse)
    assert (reply.status, reply.retry_after_s) == (503, None)


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED])
def test_a_shed_request_is_429_and_the_rest_of_its_stream_is_ignored(saturated: Desk, mode: BodyMode) -> None:
    said(saturated.exchange(), RequestHeaders(GET, end_of_stream=True))  # the one that fills the fleet
    exchange = saturated.exchange()
    *_, replies = said(exchange, headers(mode), WHOLE)
    (reply,) = replies
    assert isinstance(reply, Refuse)
    assert (reply.status, reply.retry_after_s) == (429, 2.5)
    assert said(exchange, NO_MORE, RequestTrailers(), ResponseHeaders({":status": "429"})) == [[], [], []]
    exchange.close()
    assert saturated.watch.finished_count == 1


def test_a_router_that_knows_no_fleet_yet_is_silent() -> None:
    desk = Desk()
    assert said(desk.exchange(), headers(BodyMode.BUFFERED), WHOLE) == [[GO_HEADERS], [GO_BODY]]


def test_a_fleet_that_vanished_is_503() -> None:
    desk = Desk()
    desk.join(ENDPOINT)
    desk.join()
    (reply,) = desk.exchange().receive(RequestHeaders(GET, end_of_stream=True))
    assert isinstance(reply, Refuse)
    assert reply.status == 503


STREAM = {":status": "200", "content-type": "text/event-stream; charset=utf-8"}


@pytest.mark.parametrize(
    ("answer", "first_token"),
    [
        (OK, True),
        (STREAM, False),  # an engine that answers before its first token
        ({**STREAM, "x-queue-depth": "0"}, True),  # one behind the first-token middleware
        ({":status": "503", "content-type": "application/json"}, False),
        ({":status": "404", "x-queue-depth": "0"}, False),
        ({":status": "junk"}, False),
        ({}, False),
    ],
)
def test_what_counts_as_a_first_token(desk: Desk, answer: dict[str, str], first_token: bool) -> None:
    said(desk.exchange(), headers(BodyMode.BUFFERED), WHOLE, ResponseHeaders(answer))
    assert desk.watch.starts[0].first_token is first_token


def test_the_first_token_ends_the_ledger_entry_but_not_the_lease(desk: Desk) -> None:
    prompt = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 40_000}]}).encode()
    exchange = desk.exchange()
    said(exchange, headers(BodyMode.BUFFERED), RequestBody(prompt, end_of_stream=True))
    load = desk.router.loads[f"replica-{ENDPOINT}"]
    assert load.ledger_tokens > 5_000
    exchange.receive(ResponseHeaders({**STREAM, "x-queue-depth": "0", "x-prompt-tokens": "9000"}))
    assert load.ledger_tokens == 0
    assert desk.router.in_flight(f"replica-{ENDPOINT}") == 1
    exchange.close()
    assert desk.router.in_flight(f"replica-{ENDPOINT}") == 0


@pytest.mark.parametrize("junk", ["-5", "1.5", "NaN", "9" * 30, "100000001", ""])
def test_odd_token_counts_are_ignored(desk: Desk, junk: str) -> None:
    answer = {**STREAM, "x-queue-depth": junk, "x-prompt-tokens": junk, "x-cached-tokens": junk}
    said(desk.exchange(), headers(BodyMode.BUFFERED), WHOLE, ResponseHeaders(answer))
    start = desk.watch.starts[0]
    assert (start.prompt_tokens, start.cached_tokens, start.queue_depth) == (None, None, None)


def test_the_replica_that_really_answered_is_passed_on(desk: Desk) -> None:
    said(desk.exchange(), headers(BodyMode.BUFFERED), WHOLE, ResponseHeaders(OK, served_endpoint="10.0.0.9:1"))
    assert desk.watch.starts[0].served_endpoint == "10.0.0.9:1"


@pytest.mark.parametrize("events", range(4))
def test_closing_at_any_point_releases_once(desk: Desk, events: int) -> None:
    exchange = desk.exchange()
    script: list[Event] = [headers(BodyMode.BUFFERED), WHOLE, ResponseHeaders(OK)]
    said(exchange, *script[:events])
    assert desk.router.open_leases == (1 if events >= 2 else 0)
    exchange.close()
    exchange.close()
    assert desk.router.open_leases == 0
    assert desk.watch.finished_count == len(desk.watch.decisions)


ANY: list[Event] = [
    headers(BodyMode.BUFFERED),
    WHOLE,
    BEGUN,
    RequestTrailers(),
    ResponseHeaders(OK),
    ResponseBody(b"x", end_of_stream=False),
    ResponseTrailers(),
]
OWN_PHASE: dict[type[Event], Phase] = {
    RequestHeaders: Phase.REQUEST_HEADERS,
    RequestBody: Phase.REQUEST_BODY,
    RequestTrailers: Phase.REQUEST_TRAILERS,
    ResponseHeaders: Phase.RESPONSE_HEADERS,
    ResponseBody: Phase.RESPONSE_BODY,
    ResponseTrailers: Phase.RESPONSE_TRAILERS,
}


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_any_order_gets_one_reply_of_the_right_kind_and_one_decision(desk: Desk, length: int) -> None:
    for events in itertools.product(ANY, repeat=length):
        exchange = desk.exchange()
        decided = len(desk.watch.decisions)
        for event, replies in zip(events, said(exchange, *events), strict=True):
            (reply,) = replies
            assert isinstance(reply, Continue | Route)
            assert reply.phase is OWN_PHASE[type(event)]
        assert len(desk.watch.decisions) - decided <= 1
        exchange.close()
    assert desk.router.open_leases == 0
