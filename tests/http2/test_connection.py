"""HTTP/2 as a server of gRPC speaks it, told by a client that is another's work (the library h2)."""

from __future__ import annotations

import gc
import weakref

import pytest
from h2.errors import ErrorCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.http2 import frames
from tests.http2.caller import HEADERS, MAX_MESSAGE_BYTES, Caller, Recorded


def test_a_call_from_its_beginning_to_its_end() -> None:
    caller = Caller()
    stream = caller.open(("traceparent", "00-1-2-01"))
    answer = caller.say(stream, b"one", b"", b"three")
    assert answer.headers == {":status": "200", "content-type": "application/grpc"}
    assert answer.messages == [b"one", b"", b"three"]
    assert not answer.ended
    caller.say(stream, end=True)
    assert answer.ended and answer.trailers == {"grpc-status": "0"} and answer.reset is None
    (call,) = caller.calls
    assert call.events == [b"one", b"", b"three", "half closed", "closed"]
    assert call.metadata["traceparent"] == "00-1-2-01"
    assert caller.connection.open_streams == 0


messages = st.lists(st.binary(max_size=40) | st.sampled_from([b"x" * 16_384, b"y" * 40_000]), min_size=1, max_size=5)


@settings(deadline=None)
@given(messages, st.data())
def test_however_the_bytes_are_cut_the_messages_are_the_same(sent: list[bytes], data: st.DataObject) -> None:
    step = data.draw(st.sampled_from([1, 2, 3, 5, 8, 13, 1000, 16_389]))

    def cut(there: bytes) -> list[bytes]:
        return [there[at : at + step] for at in range(0, len(there), step)]

    caller = Caller(cut=cut)
    answer = caller.say(caller.open(), *sent, end=True)
    assert answer.messages == sent
    assert caller.calls[0].events == [*sent, "half closed", "closed"]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=20), max_size=4), st.integers(1, 9))
def test_however_a_message_is_spread_over_frames_it_is_the_same(sent: list[bytes], step: int) -> None:
    caller = Caller()
    stream = caller.open()
    data = b"".join(b"\0" + len(message).to_bytes(4, "big") + message for message in sent)
    for at in range(0, len(data), step):
        caller.write(stream, data[at : at + step])
    assert caller.answers[stream].messages == sent


def test_calls_share_a_connection_and_keep_apart() -> None:
    caller = Caller()
    streams = [caller.open() for _ in range(50)]
    for number, stream in enumerate(streams):
        caller.say(stream, b"%d" % number)
    for number, stream in reversed(list(enumerate(streams))):
        assert caller.say(stream, b"again", end=True).messages == [b"%d" % number, b"again"]
    assert caller.connection.open_streams == 0


def test_headers_stay_right_while_the_table_of_them_changes() -> None:
    # Every third call adds a field of its own to the table, which renumbers all that it held.
    caller = Caller()
    for number in range(30):
        extra = [("traceparent", f"00-{number}")] if number % 3 == 0 else []
        caller.say(caller.open(*extra), b"x", end=True)
        assert caller.calls[-1].metadata == dict(HEADERS) | dict(extra)


def test_long_headers_come_in_several_frames() -> None:
    caller = Caller()
    long = "v" * 40_000
    caller.say(caller.open(("tracestate", long)), b"x", end=True)
    assert caller.calls[0].metadata["tracestate"] == long


# --- how calls end ---


def test_a_service_may_answer_first_and_end_the_call() -> None:
    def refuse(call: Recorded, message: bytes) -> None:
        call.answering.end(3, "bä 100% \n bad")

    caller = Caller(refuse)
    stream = caller.open()
    answer = caller.say(stream, b"one", b"two")
    assert answer.headers[":status"] == "200"
    assert (answer.headers["grpc-status"], answer.headers["grpc-message"]) == ("3", "b%C3%A4 100%25 %0A bad")
    assert answer.ended
    assert answer.reset == ErrorCodes.NO_ERROR  # it need not say the rest
    assert caller.calls[0].events == [b"one", "closed"]


def test_what_a_call_raises_ends_it_and_nothing_else() -> None:
    def fail(call: Recorded, message: bytes) -> None:
        if message == b"bad":
            raise RuntimeError("ours")
        call.answering.send(message)

    caller = Caller(fail)
    good, bad = caller.open(), caller.open()
    assert caller.say(bad, b"bad").headers["grpc-status"] == "2"
    assert caller.calls[1].events == [b"bad", "closed"]
    assert caller.say(good, b"good", end=True).messages == [b"good"]


def test_a_reset_closes_the_call() -> None:
    caller = Caller()
    stream = caller.open()
    caller.say(stream, b"one")
    caller.h2.reset_stream(stream)
    caller.exchange()
    assert caller.calls[0].events == [b"one", "closed"]
    assert caller.connection.open_streams == 0


def test_a_lost_connection_closes_all_calls_once() -> None:
    caller = Caller()
    for _ in range(3):
        caller.open()
    caller.connection.lost()
    caller.connection.lost()
    assert [call.events for call in caller.calls] == [["closed"]] * 3


def test_nothing_of_a_call_stays() -> None:
    caller = Caller()
    caller.say(caller.open(), b"x" * 50_000, end=True)
    left = weakref.ref(caller.calls.pop())
    gc.collect()
    assert left() is None


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({":path": "/test.Service/Other"}, {":status": "200", "grpc-status": "12"}),
        ({":path": "/"}, {":status": "200", "grpc-status": "12"}),
        ({"content-type": "application/json"}, {":status": "415"}),
    ],
)
def test_what_is_not_served_is_refused_and_the_connection_lives(
    headers: dict[str, str], expected: dict[str, str]
) -> None:
    caller = Caller()
    stream = caller.open(headers=list((dict(HEADERS) | headers).items()), end=True)
    answer = caller.answers[stream]
    assert answer.headers.items() >= expected.items()
    assert answer.ended
    assert not caller.calls
    assert caller.say(caller.open(), b"x", end=True).messages == [b"x"]


def test_a_message_above_the_limit_ends_its_call_before_it_has_come() -> None:
    caller = Caller()
    stream = caller.open()
    caller.write(stream, b"\0" + (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
    assert caller.answers[stream].headers["grpc-status"] == "8"
    assert caller.say(caller.open(), b"x" * MAX_MESSAGE_BYTES, end=True).messages == [b"x" * MAX_MESSAGE_BYTES]


def test_a_compressed_message_is_not_understood() -> None:
    caller = Caller()
    stream = caller.open()
    caller.write(stream, b"\1\0\0\0\1x")
    assert caller.answers[stream].headers["grpc-status"] == "12"


# --- beside calls ---


def test_output_at_another_time_wakes_whoever_writes() -> None:
    caller = Caller(lambda call, message: None)
    caller.say(caller.open(), b"x")
    assert caller.woken == 0
    caller.calls[0].answering.send(b"later")
    caller.calls[0].answering.send(b"and more")
    assert caller.woken == 1
    caller.exchange()
    assert caller.answers[1].messages == [b"later", b"and more"]


def test_a_ping_is_answered_and_ours_is_one() -> None:
    caller = Caller()
    caller.h2.ping(b"12345678")
    caller.exchange()
    caller.connection.ping()
    caller.exchange()
    assert caller.pings == ["answered", "asked"]


def test_whoever_leaves_lets_open_calls_go_on() -> None:
    caller = Caller()
    stream = caller.open()
    caller.connection.leave()
    caller.connection.leave()
    back = caller.connection.take_output()
    assert back == frames.goaway(stream, frames.NO_ERROR)
    # What the peer had sent when it heard so is for nobody, and no error.
    late = frames.frame(frames.HEADERS, frames.END_HEADERS, stream + 2, b"\x83")
    late += frames.frame(frames.DATA, 0, stream + 2, b"\0\0\0\0\1x") + frames.window_update(stream + 2, 1)
    late += frames.reset(stream + 2, frames.NO_ERROR)
    caller.connection.receive(late)
    assert len(caller.calls) == 1 and not caller.connection.failed
    caller.calls[0].answering.end()
    assert caller.connection.open_streams == 0


def test_whoever_is_sent_away_is_served_until_it_has_gone() -> None:
    caller = Caller()
    caller.open()
    caller.connection.send_away()
    caller.connection.send_away()
    assert caller.connection.take_output() == frames.goaway(frames.LOW_31_BITS, frames.NO_ERROR)
    last = caller.open()
    assert (len(caller.calls), caller.connection.streams_begun) == (2, 2)
    caller.connection.leave()
    assert caller.connection.take_output() == frames.goaway(last, frames.NO_ERROR)
