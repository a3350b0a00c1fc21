"""Bytes in, events out; replies in, bytes out. Checked with Envoy's own messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc import plain_messages
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
from extproc.wire import MAX_ECHO_BYTES, UnknownMessage, decode, decode_any, encode
from tests.hostile.sequences import malformed, well_formed

if TYPE_CHECKING:
    from collections.abc import Callable

ENDPOINT = "10.0.0.1:8000"
DESTINATION = "x-gateway-destination-endpoint"


def http_headers(values: list[tuple[str, bytes]], end_of_stream: bool = False) -> HttpHeaders:
    message = HttpHeaders(end_of_stream=end_of_stream)
    for key, value in values:
        message.headers.headers.add(key=key, raw_value=value)
    return message


def sent(reply: Reply) -> list[ProcessingResponse]:
    return [ProcessingResponse.FromString(message) for message in encode(reply)]


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (ProcessingRequest(request_body=HttpBody(body=b"x", end_of_stream=True)), RequestBody(b"x", True)),
        (ProcessingRequest(request_body=HttpBody()), RequestBody(b"", False)),
        (ProcessingRequest(response_body=HttpBody(body=b"y")), ResponseBody(b"y", False)),
        (ProcessingRequest(request_trailers=HttpTrailers()), RequestTrailers()),
        (ProcessingRequest(response_trailers=HttpTrailers()), ResponseTrailers()),
        (
            ProcessingRequest(response_headers=http_headers([(":status", b"200")], end_of_stream=True)),
            ResponseHeaders({":status": "200"}, True, None),
        ),
    ],
)
def test_decode(message: ProcessingRequest, event: Event) -> None:
    assert decode(message.SerializeToString()) == event


def test_decode_request_headers() -> None:
    values = [
        (":method", b"POST"),
        ("X-Upper", b"1"),
        ("x-twice", b"first"),
        ("x-twice", b"last"),
        ("x-text", "Grüße".encode()),
        ("x-bytes", b"\xff\xfe"),
    ]
    message = ProcessingRequest(request_headers=http_headers(values))
    message.request_headers.headers.headers.add(key="x-old-style", value="v")
    message.protocol_config.request_body_mode = ProcessingMode.FULL_DUPLEX_STREAMED
    assert decode(message.SerializeToString()) == RequestHeaders(
        headers={
            ":method": "POST",
            "x-upper": "1",
            "x-twice": "last",
            "x-text": "Grüße",
            "x-bytes": r"\xff\xfe",
            "x-old-style": "v",
        },
        end_of_stream=False,
        request_body_mode=BodyMode.FULL_DUPLEX_STREAMED,
        response_body_mode=BodyMode.NONE,
        allowed_endpoints=None,
    )


@pytest.mark.parametrize(
    ("hint", "allowed"),
    [
        (["10.0.0.1:1", "10.0.0.2:1"], frozenset({"10.0.0.1:1", "10.0.0.2:1"})),
        ("10.0.0.1:1, 10.0.0.2:1", frozenset({"10.0.0.1:1", "10.0.0.2:1"})),
        ([], frozenset()),
        ("", frozenset()),
    ],
)
def test_decode_subset_hint(hint: object, allowed: frozenset[str]) -> None:
    message = ProcessingRequest(request_headers=HttpHeaders())
    hints = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    hints.update({"x-gateway-destination-endpoint-subset": hint})
    event = decode(message.SerializeToString())
    assert isinstance(event, RequestHeaders)
    assert event.allowed_endpoints == allowed


def test_metadata_of_others_is_no_hint() -> None:
    message = ProcessingRequest(request_headers=HttpHeaders())
    message.metadata_context.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-subset": "x"})
    event = decode(message.SerializeToString())
    assert isinstance(event, RequestHeaders)
    assert event.allowed_endpoints is None


def test_decode_served_endpoint() -> None:
    message = ProcessingRequest(response_headers=HttpHeaders())
    message.metadata_context.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": ENDPOINT})
    assert decode(message.SerializeToString()) == ResponseHeaders({}, False, ENDPOINT)


@pytest.mark.parametrize("message", [b"", b"\xff\xff\xff", b"\x50\x01"])
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(UnknownMessage):
        decode(message)


@pytest.mark.parametrize("phase", Phase)
def test_continue_answers_with_its_own_kind(phase: Phase) -> None:
    (response,) = sent(Continue(phase))
    assert response.WhichOneof("response") == phase.value
    assert not response.HasField("dynamic_metadata")


@pytest.mark.parametrize("phase", [Phase.REQUEST_HEADERS, Phase.REQUEST_BODY])
def test_a_route_is_the_same_in_header_and_metadata(phase: Phase) -> None:
    (response,) = sent(Route(phase, ENDPOINT))
    assert response.WhichOneof("response") == phase.value
    (option,) = getattr(response, phase.value).response.header_mutation.set_headers
    assert (option.header.key, option.header.raw_value) == (DESTINATION, ENDPOINT.encode())
    assert option.append_action == option.OVERWRITE_IF_EXISTS_OR_ADD
    assert response.dynamic_metadata["envoy.lb"][DESTINATION] == ENDPOINT


def test_a_route_at_the_trailers_is_in_metadata() -> None:
    (response,) = sent(Route(Phase.REQUEST_TRAILERS, ENDPOINT))
    assert response.WhichOneof("response") == "request_trailers"
    assert response.dynamic_metadata["envoy.lb"][DESTINATION] == ENDPOINT


def test_a_route_without_the_body_says_all_modes_that_are_to_hold() -> None:
    (response,) = sent(Route(Phase.REQUEST_HEADERS, ENDPOINT, without_body=True))
    assert response.request_headers.response.header_mutation.set_headers[0].header.key == DESTINATION
    assert response.mode_override == ProcessingMode(
        request_body_mode=ProcessingMode.NONE,
        response_header_mode=ProcessingMode.SEND,
        response_trailer_mode=ProcessingMode.SEND,
    )
    (plain,) = sent(Route(Phase.REQUEST_HEADERS, ENDPOINT))
    assert not plain.HasField("mode_override")


@pytest.mark.parametrize("endpoint", ["10.0.0.1:1\r\nx: y", "10.0.0.1:1\n", "10.0.0.1\0:1", "hôte:1"])
def test_a_value_cannot_break_out_of_its_header(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"ordinal|CR, LF or NUL"):
        list(encode(Route(Phase.REQUEST_HEADERS, endpoint)))


@pytest.mark.parametrize("size", [0, 1, MAX_ECHO_BYTES - 1, MAX_ECHO_BYTES, MAX_ECHO_BYTES + 1, 3 * MAX_ECHO_BYTES + 7])
@pytest.mark.parametrize("end", [True, False])
def test_an_echo_gives_every_byte_back_in_small_pieces(size: int, end: bool) -> None:
    body = bytes(number % 251 for number in range(size))
    responses = sent(Echo(Phase.REQUEST_BODY, body, end))
    pieces = [response.request_body.response.body_mutation.streamed_response for response in responses]
    assert b"".join(piece.body for piece in pieces) == body
    assert all(len(piece.body) <= 62_000 for piece in pieces)
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [end]
    assert len(pieces) == max(1, -(-size // MAX_ECHO_BYTES))


@pytest.mark.parametrize(("retry_after_s", "header"), [(0.2, "1"), (2.0, "2"), (2.1, "3"), (None, None)])
def test_a_refusal_is_an_openai_error(retry_after_s: float | None, header: str | None) -> None:
    (response,) = sent(Refuse(429, "rate_limit_exceeded", "later", retry_after_s))
    immediate = response.immediate_response
    assert immediate.status.code == 429
    assert json.loads(immediate.body) == {
        "error": {"message": "later", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}
    }
    values = {option.header.key: option.header.raw_value.decode() for option in immediate.headers.set_headers}
    assert values.pop("content-type") == "application/json"
    assert values == ({} if header is None else {"retry-after": header})


# --- the quick reader of plain messages says what protobuf's own says ---


def outcome(read: Callable[[bytes], Event], message: bytes) -> Event | None:
    try:
        return read(message)
    except UnknownMessage:
        return None


@settings(deadline=None)
@given(well_formed | malformed)
def test_both_readers_agree(message: bytes) -> None:
    assert outcome(decode, message) == outcome(decode_any, message)


@settings(deadline=None)
@given(well_formed, st.data())
def test_both_readers_agree_on_what_was_damaged_on_its_way(message: bytes, data: st.DataObject) -> None:
    if message:
        place = data.draw(st.integers(0, min(len(message), 300) - 1))
        damage = data.draw(st.sampled_from([b"", b"\x00", b"\xff", b"\x0a", b"\x80\x01"]) | st.binary(max_size=3))
        message = message[:place] + damage + message[place + data.draw(st.integers(0, 2)) :]
    assert outcome(decode, message) == outcome(decode_any, message)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 16_383, 16_384, 70_000, 3 << 20])
@pytest.mark.parametrize("end_of_stream", [True, False])
def test_lengths_of_every_size_are_read(size: int, end_of_stream: bool) -> None:
    body = ProcessingRequest(request_body=HttpBody(body=b"x" * size, end_of_stream=end_of_stream)).SerializeToString()
    assert plain_messages.read(body) == RequestBody(b"x" * size, end_of_stream)
    headers = http_headers([("X-Long", b"y" * min(size, 70_000)), (":path", b"/")], end_of_stream)
    event = plain_messages.read(ProcessingRequest(request_headers=headers).SerializeToString())
    assert event == RequestHeaders({"x-long": "y" * min(size, 70_000), ":path": "/"}, end_of_stream)


def test_what_envoy_says_of_a_request_needs_no_other_reader() -> None:
    opening = ProcessingRequest(request_headers=http_headers([(":method", b"POST")]))
    opening.protocol_config.request_body_mode = 2
    body = ProcessingRequest(request_body=HttpBody(body=b"{}", end_of_stream=True))
    body.metadata_context.SetInParent()
    answer = ProcessingRequest(response_headers=http_headers([(":status", b"200")]))
    answer.metadata_context.filter_metadata["envoy.lb"].update(
        {DESTINATION: ENDPOINT, f"{DESTINATION}-served": ENDPOINT}
    )
    for message in (opening, body, answer):
        serialized = message.SerializeToString()
        assert plain_messages.read(serialized) == decode_any(serialized)
