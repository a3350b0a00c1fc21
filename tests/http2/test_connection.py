"""HTTP/2 as a server of gRPC speaks it, told by a client that is another's work (the library h2)."""

from __future__ import annotations

import gc
import weakref

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.http2 import frames
from extproc.http2.connection import MAX_CONTINUATIONS, MAX_SETTINGS_FRAMES, Connection
from tests.http2.caller import HEADERS, MAX_MESSAGE_BYTES, PATH, Caller, Recorded, echo

SETTINGS = frames.PREFACE + frames.settings({})


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


# --- flow control ---


def test_a_call_that_goes_on_is_given_room_again_and_again() -> None:
    caller = Caller()
    stream = caller.open()
    for _ in range(40):  # 40 x 60,000 = 2.4 MB through a window of 165,535
        caller.say(stream, b"x" * 60_000)
    assert len(caller.answers[stream].messages) == 40


def test_the_connection_is_given_room_again() -> None:
    caller = Caller(lambda call, message: None)
    before = caller.h2.outbound_flow_control_window
    for _ in range(400):  # 24 MB: past the step of 16 MiB
        caller.say(caller.open(), b"x" * 60_000, end=True)
    assert before - caller.h2.outbound_flow_control_window < 16 * 1024 * 1024


def test_answers_wait_for_the_peers_window_and_lose_nothing() -> None:
    caller = Caller()
    caller.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1000})
    caller.exchange()
    caller.acknowledge = False
    stream = caller.open()
    sent = [bytes([number]) * 700 for number in range(5)]
    answer = caller.say(stream, *sent, end=True)
    assert len(answer.data) == 1000 and not answer.ended  # 5 x 705 = 3,525 wait for 1,000
    caller.h2.increment_flow_control_window(100, stream)
    caller.exchange()
    assert len(answer.data) == 1100
    caller.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 500})  # 500 less for the open one: 1,000 + 100 - 500
    caller.h2.increment_flow_control_window(3000, stream)
    caller.exchange()
    assert answer.messages == sent and answer.ended and answer.trailers["grpc-status"] == "0"


def test_answers_wait_for_the_window_of_the_connection() -> None:
    caller = Caller()
    caller.acknowledge = False
    first, second = caller.open(), caller.open()
    caller.say(first, b"x" * 60_000, end=True)
    answer = caller.say(second, b"y" * 60_000, end=True)
    assert len(answer.data) < 6000  # 65,535 in all
    caller.h2.increment_flow_control_window(1 << 20)
    caller.exchange()
    assert answer.messages == [b"y" * 60_000] and answer.ended


def test_a_peer_that_takes_no_answers_is_given_no_room() -> None:
    # The window of 165,535 takes two messages; were there more room, we would hold what it does not take.
    caller = Caller()
    caller.acknowledge = False
    stream = caller.open()
    for _ in range(2):
        caller.say(stream, b"x" * 80_000)
    assert caller.h2.local_flow_control_window(stream) < 10_000
    caller.acknowledge = True
    caller.h2.increment_flow_control_window(1 << 20)
    caller.h2.increment_flow_control_window(1 << 20, stream)
    caller.exchange()
    assert caller.h2.local_flow_control_window(stream) > 80_000


def test_a_peer_that_sends_past_its_window_loses_the_stream() -> None:
    # Its own window is closed, so its messages' echoes would be held: up to our window, and no further.
    held: list[bytes] = []
    connection = Connection({PATH: lambda answering, _: Recorded(answering, {}, echo)}, MAX_MESSAGE_BYTES, lambda: None)
    connection.receive(frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
    block = b"\x83\x86\x04" + bytes([len(PATH)]) + PATH.encode() + b"\x5f\x10application/grpc"
    connection.receive(headers_frame(1, block=block))
    connection.take_output()
    piece = b"\0" + (10_000).to_bytes(4, "big") + bytes(10_000)
    for _ in range(100):  # 1 MB, through a window of 165,535
        connection.receive(frames.frame(frames.DATA, 0, 1, piece))
        held.append(connection.take_output())
    assert b"".join(held).endswith(frames.reset(1, frames.FLOW_CONTROL_ERROR))
    assert connection.open_streams == 0 and not connection.failed


def test_settings_without_end_are_not_followed() -> None:
    connection = Connection({}, MAX_MESSAGE_BYTES, lambda: None)
    connection.receive(SETTINGS + frames.settings({frames.INITIAL_WINDOW_SIZE: 1}) * MAX_SETTINGS_FRAMES)
    assert connection.failed == "settings without end"


def test_a_window_that_settings_push_past_its_limit_is_an_error() -> None:
    caller = Caller()
    stream = caller.open()
    caller.connection.receive(frames.window_update(stream, 2**31 - 1 - 65_535))
    caller.connection.receive(frames.settings({frames.INITIAL_WINDOW_SIZE: 65_536}))
    assert caller.connection.failed


def test_a_peers_frames_may_be_no_larger_than_it_says_and_its_windows_may_be_huge() -> None:
    caller = Caller(max_message_bytes=1 << 20)
    caller.h2.update_settings({SettingCodes.MAX_FRAME_SIZE: 1 << 20, SettingCodes.INITIAL_WINDOW_SIZE: 1 << 30})
    caller.h2.increment_flow_control_window(1 << 20)
    caller.exchange()
    assert caller.say(caller.open(), b"x" * 500_000, end=True).messages == [b"x" * 500_000]


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


# --- peers that break the protocol: RFC 9113 names the error of each ---


def headers_frame(stream_id: int, flags: int = frames.END_HEADERS, block: bytes = b"\x83") -> bytes:
    return frames.frame(frames.HEADERS, flags, stream_id, block)


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
