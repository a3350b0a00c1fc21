"""Windows: who may send how much, and what is held of what nobody takes (RFC 9113, 5.2 and 6.9)."""

from __future__ import annotations

from h2.settings import SettingCodes

from extproc.http2 import frames
from extproc.http2.connection import MAX_SETTINGS_FRAMES, Connection
from tests.http2.caller import MAX_MESSAGE_BYTES, PATH, SETTINGS, Caller, Recorded, echo, headers_frame


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
