"""Peers that break the protocol: RFC 9113 names the error of each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.http2 import frames
from extproc.http2.connection import MAX_CONTINUATIONS, Connection
from tests.http2.caller import MAX_MESSAGE_BYTES, PATH, SETTINGS, Recorded, headers_frame


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", frames.PROTOCOL_ERROR),
        (frames.PREFACE + headers_frame(1), frames.PROTOCOL_ERROR),
        (SETTINGS + frames.frame(frames.DATA, 0, 1, b"x"), frames.PROTOCOL_ERROR),
        (SETTINGS + frames.frame(frames.DATA, 0, 0, b"x"), frames.PROTOCOL_ERROR),
        (SETTINGS + headers_frame(2), frames.PROTOCOL_ERROR),
        (SETTINGS + headers_frame(0), frames.PROTOCOL_ERROR),
        (SETTINGS + headers_frame(1, 0) + headers_frame(3), frames.PROTOCOL_ERROR),
        (SETTINGS + frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, b"\x83"), frames.PROTOCOL_ERROR),
        (SETTINGS + headers_frame(1, frames.END_HEADERS | frames.PADDED, b"\x09\x83"), frames.PROTOCOL_ERROR),
        (SETTINGS + headers_frame(1, frames.END_HEADERS, b"\xff\xff\xff\xff\xff"), frames.COMPRESSION_ERROR),
        (SETTINGS + headers_frame(1, frames.END_HEADERS, b"\x00\x05ab"), frames.COMPRESSION_ERROR),
        (SETTINGS + frames.frame(frames.DATA, 0, 1, bytes(16_385)), frames.FRAME_SIZE_ERROR),
        (SETTINGS + frames.frame(frames.SETTINGS, 0, 0, b"12345"), frames.FRAME_SIZE_ERROR),
        (SETTINGS + frames.frame(frames.SETTINGS, 0, 1), frames.PROTOCOL_ERROR),
        (SETTINGS + frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31}), frames.FLOW_CONTROL_ERROR),
        (SETTINGS + frames.settings({frames.MAX_FRAME_SIZE: 16_383}), frames.PROTOCOL_ERROR),
        (SETTINGS + frames.settings({frames.ENABLE_PUSH: 2}), frames.PROTOCOL_ERROR),
        (SETTINGS + frames.frame(frames.PING, 0, 0, b"1"), frames.FRAME_SIZE_ERROR),
        (SETTINGS + frames.frame(frames.PING, 0, 1, b"12345678"), frames.PROTOCOL_ERROR),
        (SETTINGS + frames.frame(frames.RST_STREAM, 0, 1, b"1234"), frames.PROTOCOL_ERROR),
        (SETTINGS + frames.frame(frames.RST_STREAM, 0, 0, b"1234"), frames.PROTOCOL_ERROR),
        (SETTINGS + frames.window_update(0, 0), frames.FLOW_CONTROL_ERROR),
        (SETTINGS + frames.window_update(0, 2**31 - 1), frames.FLOW_CONTROL_ERROR),
        (SETTINGS + frames.window_update(1, 1), frames.PROTOCOL_ERROR),
        (SETTINGS + frames.frame(frames.PUSH_PROMISE, 0, 1, b"1234"), frames.PROTOCOL_ERROR),
        (SETTINGS + frames.frame(frames.GOAWAY, 0, 1, b"12345678"), frames.PROTOCOL_ERROR),
    ],
)
def test_a_broken_connection_is_ended_with_its_error(data: bytes, error: int) -> None:
    connection = Connection({}, MAX_MESSAGE_BYTES, lambda: None)
    connection.take_output()
    for at in range(len(data)):  # a byte at a time, so that every cut is met
        connection.receive(data[at : at + 1])
    assert connection.failed
    goaway = connection.take_output()[-17:]
    assert goaway[3] == frames.GOAWAY and int.from_bytes(goaway[13:], "big") == error


@pytest.mark.parametrize(
    "flood",
    [
        headers_frame(1, 0, b"") + frames.frame(frames.CONTINUATION, 0, 1) * (MAX_CONTINUATIONS + 1),
        headers_frame(1, 0, b"") + frames.frame(frames.CONTINUATION, 0, 1, bytes(16_384)) * 5,
    ],
)
def test_headers_without_end_are_not_collected(flood: bytes) -> None:
    connection = Connection({}, MAX_MESSAGE_BYTES, lambda: None)
    connection.receive(SETTINGS + flood)
    assert connection.failed == "too many headers"


def test_headers_that_unpack_to_much_are_not_unpacked() -> None:
    # One field of 4,000 bytes, remembered, and then a thousand references to it.
    connection = Connection({}, MAX_MESSAGE_BYTES, lambda: None)
    field = b"\x40\x01a\x7f" + bytes([0x80 | (4000 - 127) & 0x7F, (4000 - 127) >> 7]) + b"v" * 4000
    connection.receive(SETTINGS + headers_frame(1, frames.END_HEADERS, field + b"\xbe" * 1000))
    assert connection.failed


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_after_the_preface_are_survived(data: bytes) -> None:
    connection = Connection({}, MAX_MESSAGE_BYTES, lambda: None)
    connection.receive(SETTINGS)
    connection.receive(data)
    connection.take_output()


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 255), st.sampled_from([0, 1, 2, 3, 5, 2**31 - 1]))
        | st.just((frames.HEADERS, frames.END_HEADERS, 1)),
        max_size=12,
    ),
    st.data(),
)
def test_any_frames_are_survived_and_every_call_is_closed(
    sequence: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    calls: list[Recorded] = []

    def begin(answering: object, metadata: object) -> Recorded:
        calls.append(Recorded(answering, metadata, lambda call, message: call.answering.send(message)))  # type: ignore[arg-type]
        return calls[-1]

    connection = Connection({PATH: begin}, MAX_MESSAGE_BYTES, lambda: None)
    connection.receive(SETTINGS)
    block = b"\x83\x86\x04" + bytes([len(PATH)]) + PATH.encode() + b"\x5f\x10application/grpc"
    for kind, flags, stream_id in sequence:
        payload = block if kind == frames.HEADERS else data.draw(st.binary(max_size=20))
        connection.receive(frames.frame(kind, flags, stream_id, payload))
    connection.lost()
    assert all(call.events.count("closed") == 1 and call.events[-1] == "closed" for call in calls)
    assert connection.open_streams == 0
