"""A client for a connection under test: the library h2 writes and reads HTTP/2, so that our own reading is not judged
by our own writing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import h2.config
import h2.connection
import h2.events

from extproc.http2 import frames
from extproc.http2.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from extproc.call import Answering

PATH = "/test.Service/Method"
MAX_MESSAGE_BYTES = 100_000
SETTINGS = frames.PREFACE + frames.settings({})
"""What a client begins with."""
HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", PATH),
    (":authority", "router"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


@dataclass
class Recorded:
    """A call that writes down what happens to it. `on` is what it does with a message; by default it echoes."""

    answering: Answering
    metadata: Mapping[str, str]
    on: Callable[[Recorded, bytes], None]
    events: list[bytes | str] = field(default_factory=list)

    def received(self, message: bytes) -> None:
        self.events.append(message)
        self.on(self, message)

    def half_closed(self) -> None:
        self.events.append("half closed")
        self.answering.end()

    def closed(self) -> None:
        self.events.append("closed")


def echo(call: Recorded, message: bytes) -> None:
    call.answering.send(message)


@dataclass
class Answer:
    """What came back on one stream."""

    headers: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)
    ended: bool = False
    reset: int | None = None

    @property
    def messages(self) -> list[bytes]:
        found, rest = [], self.data
        while rest:
            length = int.from_bytes(rest[1:5], "big")
            found.append(rest[5 : 5 + length])
            rest = rest[5 + length :]
        return found


class Caller:
    """A client and the connection under test, joined in memory.

    cut: into which pieces the client's bytes are cut on their way.
    """

    def __init__(
        self,
        on: Callable[[Recorded, bytes], None] = echo,
        cut: Callable[[bytes], Iterable[bytes]] = lambda data: [data],
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.calls: list[Recorded] = []
        self.answers: dict[int, Answer] = {}
        self.last_goaway: h2.events.ConnectionTerminated | None = None
        self.woken = 0
        self.pings: list[str] = []
        self.acknowledge = True
        self._cut = cut
        self._on = on
        self.connection = Connection({PATH: self._begin}, max_message_bytes, self._wake)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.exchange()

    def _begin(self, answering: Answering, metadata: Mapping[str, str]) -> Recorded:
        call = Recorded(answering, metadata, self._on)
        self.calls.append(call)
        return call

    def _wake(self) -> None:
        self.woken += 1

    def exchange(self) -> None:
        """Carry bytes to and fro until both are silent."""
        while True:
            there = self.h2.data_to_send()
            for piece in self._cut(there):
                self.connection.receive(piece)
            back = self.connection.take_output()
            if not there and not back:
                return
            for event in self.h2.receive_data(back):
                self._note(event)

    def _note(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived():
                self.answers[event.stream_id].headers = dict(event.headers)
            case h2.events.DataReceived():
                self.answers[event.stream_id].data += event.data
                if self.acknowledge and event.flow_controlled_length:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.TrailersReceived():
                self.answers[event.stream_id].trailers = dict(event.headers)
            case h2.events.StreamEnded():
                self.answers[event.stream_id].ended = True
            case h2.events.StreamReset():
                self.answers[event.stream_id].reset = event.error_code
            case h2.events.PingReceived():
                self.pings.append("asked")
            case h2.events.PingAckReceived():
                self.pings.append("answered")
            case h2.events.ConnectionTerminated():
                self.last_goaway = event

    def open(self, *extra: tuple[str, str], headers: list[tuple[str, str]] = HEADERS, end: bool = False) -> int:
        """Begin a call; returns its stream."""
        stream_id = self.h2.get_next_available_stream_id()
        self.answers[stream_id] = Answer()
        self.h2.send_headers(stream_id, [*headers, *extra], end_stream=end)
        self.exchange()
        return stream_id

    def say(self, stream_id: int, *messages: bytes, end: bool = False) -> Answer:
        """Send messages of a call, as far as windows let, in frames as large as may be."""
        data = b"".join(b"\0" + len(message).to_bytes(4, "big") + message for message in messages)
        self.write(stream_id, data, end=end)
        return self.answers[stream_id]

    def write(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        while data:
            room = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size)
            assert room > 0, "the server gives no room"
            self.h2.send_data(stream_id, data[:room])
            data = data[room:]
            self.exchange()
        if end:
            self.h2.end_stream(stream_id)
            self.exchange()


def headers_frame(stream_id: int, flags: int = frames.END_HEADERS, block: bytes = b"\x83") -> bytes:
    return frames.frame(frames.HEADERS, flags, stream_id, block)
