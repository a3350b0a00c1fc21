"""One HTTP/2 connection of a gRPC server: bytes in, bytes out (RFC 9113). Knows no socket and no clock.

Theory of operation
-------------------
`receive` takes bytes as they come, cut anywhere, and tells the calls; what they answer, and what the protocol demands,
collects until `take_output`. `woken` is called when something collects at another time.

A stream carries one call. Its two directions end by themselves, in any order:

    the peer's    open      END_STREAM                            -> ended; the call is told `half_closed`
    ours          open      the call's `end`: trailers            -> ended
    both ended, RST_STREAM from either side, or the connection's loss  -> gone; the call is told `closed`

We are at fault for nothing that a peer does: an error of one stream ends that stream, an error of the connection's own
state ends the connection with GOAWAY.

What a peer may make us hold: of each stream one incomplete message (`max_message_bytes`), one block of headers
(`MAX_HEADERS_BYTES`), and answers that it does not take: those up to a window's length, since a stream whose answers
wait is given no further room to send.
"""

from __future__ import annotations

import logging
from struct import Struct
from typing import TYPE_CHECKING, Final

from extproc.call import UNIMPLEMENTED, UNKNOWN
from extproc.http2 import frames
from extproc.http2.headers import ANSWER, MAX_HEADERS_BYTES, UNSUPPORTED, BadHeaders, HeaderBlocks
from extproc.http2.stream import PREFIX_BYTES, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from extproc.call import Service

MAX_STREAMS: Final = 100_000
"""Open at a time: one for each request that runs. No fleet of a thousand engines has as many."""
MAX_CONTINUATIONS: Final = 16
"""Frames of one block of headers: 64 KiB are four. Empty ones would cost time and nothing else (CVE-2024-27316)."""
MAX_SETTINGS_FRAMES: Final = 100
"""Each may mean a look at all streams. Envoy sends one."""
CONNECTION_WINDOW_BYTES: Final = frames.LARGEST_WINDOW_BYTES
"""The streams' own windows bound what is held."""
CONNECTION_STEP_BYTES: Final = 16 * 1024 * 1024

_DATA_HEAD: Final = Struct(">HBBBLBL")
"""A frame's head and a gRPC message's prefix: length (24 bits), kind, flags, stream; compressed or not, length."""

log = logging.getLogger(__name__)


class ConnectionFailed(Exception):
    """The peer broke the connection's state. error: HTTP/2's code."""

    def __init__(self, error: int, message: str) -> None:
        super().__init__(message)
        self.error = error


class Connection:
    """Serves `services` (by path, "/package.Service/Method") to one peer.

    woken: called when output collects outside of `receive`.
    sent_away: the peer has been asked to leave.
    failed: why the connection must be closed, once its output is out; empty while it need not.
    """

    def __init__(self, services: Mapping[str, Service], max_message_bytes: int, woken: Callable[[], None]) -> None:
        self.failed = ""
        self.sent_away = False
        self._services = services
        self._woken = woken
        self._max_message_bytes = max_message_bytes
        self._window_bytes = max_message_bytes + frames.DEFAULT_WINDOW_BYTES
        self._headers = HeaderBlocks()
        self._streams: dict[int, Stream] = {}
        self._blocked: dict[int, Stream] = {}
        self._seen_id = 0
        self._last_id = 0  # of those that are served
        self._settings_frames = 0
        self._rest = b""
        self._begun = False
        self._greeted = False
        self._receiving = False
        self._leaving = False
        self._block: list[bytes] = []
        self._block_of = 0
        self._block_flags = 0
        self._block_bytes = 0
        self._unacknowledged_bytes = 0
        self._send_window_bytes = frames.DEFAULT_WINDOW_BYTES
        self._peer_window_bytes = frames.DEFAULT_WINDOW_BYTES
        self._peer_frame_bytes = frames.DEFAULT_FRAME_BYTES
        self._output: list[bytes] = [
            frames.settings(
                {
                    frames.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
                    frames.INITIAL_WINDOW_SIZE: self._window_bytes,
                }
            ),
            frames.window_update(0, CONNECTION_WINDOW_BYTES - frames.DEFAULT_WINDOW_BYTES),
        ]

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def take_output(self) -> bytes:
        """What is to be sent, in order; each byte once."""
        if not self._output:
            return b""
        output = b"".join(self._output)
        self._output.clear()
        return output

    def receive(self, data: bytes) -> None:
        """The next bytes of the peer."""
        if self.failed:
            return
        self._receiving = True
        try:
            self._receive(data)
        except ConnectionFailed as failure:
            self.fail(failure.error, str(failure))
        finally:
            self._receiving = False

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._write(frames.frame(frames.PING, 0, 0, b"keepaliv"))

    @property
    def streams_begun(self) -> int:
        return (self._last_id + 1) // 2

    def send_away(self) -> None:
        """Have the peer begin its next streams on another connection. Those that it begins until then are served."""
        if not self.sent_away and not self._leaving and not self.failed:
            self.sent_away = True
            self._write(frames.goaway(frames.LOW_31_BITS, frames.NO_ERROR))  # "none is refused" (6.8)

    def leave(self) -> None:
        """No new streams; those that are open go on."""
        if not self._leaving and not self.failed:
            self._leaving = True
            self._write(frames.goaway(self._last_id, frames.NO_ERROR))

    def fail(self, error: int, message: str) -> None:
        """End the connection with an error of the peer's."""
        self.failed = message
        self._write(frames.goaway(self._last_id, error))
        self.lost()

    def lost(self) -> None:
        """The connection is no more: neither are its calls."""
        streams = list(self._streams.values())
        self._streams.clear()
        self._blocked.clear()
        for stream in streams:
            self._close(stream)

    # --- frames in ---

    def _receive(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        at = 0
        if not self._begun:
            preface = data[: len(frames.PREFACE)]
            if not frames.PREFACE.startswith(preface):
                raise ConnectionFailed(frames.PROTOCOL_ERROR, "not HTTP/2")
            if len(preface) < len(frames.PREFACE):
                self._rest = data
                return
            self._begun = True
            at = len(frames.PREFACE)
        size = len(data)
        while size - at >= frames.HEAD_BYTES:
            length = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            if length > frames.DEFAULT_FRAME_BYTES:
                raise ConnectionFailed(frames.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            start = at + frames.HEAD_BYTES
            stop = start + length
            if stop > size:
                break
            stream_id = int.from_bytes(data[at + 5 : start], "big") & frames.LOW_31_BITS
            self._frame(data[at + 3], data[at + 4], stream_id, data, start, stop)
            at = stop
        self._rest = data[at:] if at < size else b""

    def _frame(self, kind: int, flags: int, stream_id: int, data: bytes, start: int, stop: int) -> None:
        if self._block_of and kind != frames.CONTINUATION:
            raise ConnectionFailed(frames.PROTOCOL_ERROR, "a block of headers was interrupted")
        if kind == frames.DATA:
            self._on_data(flags, stream_id, data, start, stop)
        elif kind == frames.HEADERS:
            self._on_headers(flags, stream_id, data, start, stop)
        elif kind == frames.RST_STREAM:
            self._expect(stop - start == 4, "RST_STREAM of another length", frames.FRAME_SIZE_ERROR)
            self._expect(0 < stream_id <= self._seen_id, "RST_STREAM for a stream that was never opened")
            self._forget(stream_id)
        elif kind == frames.WINDOW_UPDATE:
            self._on_window_update(stream_id, data, start, stop)
        elif kind == frames.SETTINGS:
            self._on_settings(flags, stream_id, data[start:stop])
        elif kind == frames.PING:
            self._expect(stream_id == 0, "PING on a stream")
            self._expect(stop - start == 8, "PING of another length", frames.FRAME_SIZE_ERROR)
            if not flags & frames.ACK:
                self._write(frames.frame(frames.PING, frames.ACK, 0, data[start:stop]))
        elif kind == frames.CONTINUATION:
            self._on_continuation(flags, stream_id, data[start:stop])
        elif kind == frames.GOAWAY:
            self._expect(stream_id == 0, "GOAWAY on a stream")
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFailed(frames.PROTOCOL_ERROR, "a client cannot push")
        # PRIORITY is history (5.3), and unknown kinds are to be ignored (5.5).
        if not self._greeted and kind != frames.SETTINGS:
            raise ConnectionFailed(frames.PROTOCOL_ERROR, "SETTINGS come first")

    def _expect(self, right: bool, otherwise: str, error: int = frames.PROTOCOL_ERROR) -> None:
        if not right:
            raise ConnectionFailed(error, otherwise)

    def _on_data(self, flags: int, stream_id: int, data: bytes, start: int, stop: int) -> None:
        counted = stop - start  # padding counts (6.9.1)
        self._unacknowledged_bytes += counted
        if self._unacknowledged_bytes >= CONNECTION_STEP_BYTES:
            self._write(frames.window_update(0, self._unacknowledged_bytes))
            self._unacknowledged_bytes = 0
        if flags & frames.PADDED:
            self._expect(start < stop and data[start] < stop - start, "padding that is longer than its frame")
            stop -= data[start]
            start += 1
        stream = self._streams.get(stream_id)
        if stream is None:
            # A stream that we have ended, and the peer does not know it yet.
            self._expect(0 < stream_id <= self._seen_id, "DATA for a stream that was never opened")
            return
        if stream.peer_ended:
            self._reset(stream_id, frames.STREAM_CLOSED)
            return
        stream.unacknowledged_bytes += counted
        if stream.unacknowledged_bytes > self._window_bytes:
            self._reset(stream_id, frames.FLOW_CONTROL_ERROR)
            return
        try:
            stream.data(data, start, stop, self._max_message_bytes)
        except Exception:
            log.exception("a call failed")
            stream.end(UNKNOWN, "internal error")
        if flags & frames.END_STREAM:
            self._half_close(stream)
        elif stream.unacknowledged_bytes > self._window_bytes // 2:
            self._give_room(stream)

    def _give_room(self, stream: Stream) -> None:
        if not stream.waiting and stream.id in self._streams:
            self._write(frames.window_update(stream.id, stream.unacknowledged_bytes))
            stream.unacknowledged_bytes = 0

    def _on_headers(self, flags: int, stream_id: int, data: bytes, start: int, stop: int) -> None:
        self._expect(stream_id % 2 == 1, "HEADERS on a stream that clients do not open")
        if flags & frames.PADDED:
            self._expect(start < stop and data[start] < stop - start, "padding that is longer than its frame")
            stop -= data[start]
            start += 1
        if flags & frames.PRIORITIZED:
            start += 5
            self._expect(start <= stop, "HEADERS too short for a priority", frames.FRAME_SIZE_ERROR)
        if flags & frames.END_HEADERS:
            self._on_block(stream_id, flags, data[start:stop])
            return
        self._block_of, self._block_flags = stream_id, flags
        self._block = [data[start:stop]]
        self._block_bytes = stop - start

    def _on_continuation(self, flags: int, stream_id: int, piece: bytes) -> None:
        self._expect(stream_id == self._block_of != 0, "CONTINUATION of nothing")
        self._block.append(piece)
        self._block_bytes += len(piece)
        if len(self._block) > MAX_CONTINUATIONS or self._block_bytes > MAX_HEADERS_BYTES:
            raise ConnectionFailed(frames.ENHANCE_YOUR_CALM, "too many headers")
        if flags & frames.END_HEADERS:
            block, self._block, self._block_of = b"".join(self._block), [], 0
            self._on_block(stream_id, self._block_flags, block)

    def _on_block(self, stream_id: int, flags: int, block: bytes) -> None:
        try:
            headers = self._headers.read(block)  # always: what it adds to the table, later blocks refer to
        except BadHeaders as error:
            raise ConnectionFailed(frames.COMPRESSION_ERROR, str(error)) from error
        stream = self._streams.get(stream_id)
        if stream is not None:  # trailers, which say nothing that a service here wants to know
            if flags & frames.END_STREAM and not stream.peer_ended:
                self._half_close(stream)
            else:
                self._reset(stream_id, frames.PROTOCOL_ERROR)
        elif stream_id > self._seen_id:
            self._seen_id = stream_id
            if self._leaving:
                return  # it has been told that these are not served
            self._last_id = stream_id
            if len(self._streams) >= MAX_STREAMS:
                self._write(frames.reset(stream_id, frames.REFUSED_STREAM))
            else:
                self._open(stream_id, headers, bool(flags & frames.END_STREAM))

    def _open(self, stream_id: int, headers: Mapping[str, str], peer_ended: bool) -> None:
        stream = Stream(self, stream_id, self._peer_window_bytes)
        stream.peer_ended = peer_ended
        self._streams[stream_id] = stream
        service = self._services.get(headers.get(":path", ""))
        if not headers.get("content-type", "").startswith("application/grpc"):
            self._write(frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream_id, UNSUPPORTED))
            stream.ending = b""
            self._gone(stream)
            return
        if service is None:
            stream.end(UNIMPLEMENTED, "no such method")
        else:
            try:
                stream.call = service(stream, headers)
            except Exception:
                log.exception("a call failed")
                stream.end(UNKNOWN, "internal error")
            if stream_id not in self._streams:  # it has answered already
                self._close(stream)
                return
        if peer_ended:
            self._half_close(stream)

    def _half_close(self, stream: Stream) -> None:
        stream.peer_ended = True
        if stream.ending is None and stream.call is not None:
            try:
                stream.call.half_closed()
            except Exception:
                log.exception("a call failed")
                stream.end(UNKNOWN, "internal error")

    def _on_window_update(self, stream_id: int, data: bytes, start: int, stop: int) -> None:
        self._expect(stop - start == 4, "WINDOW_UPDATE of another length", frames.FRAME_SIZE_ERROR)
        more_bytes = int.from_bytes(data[start:stop], "big") & frames.LOW_31_BITS
        if stream_id == 0:
            self._send_window_bytes += more_bytes
            in_bounds = more_bytes > 0 and self._send_window_bytes <= frames.LARGEST_WINDOW_BYTES
            self._expect(in_bounds, "a window that cannot be", frames.FLOW_CONTROL_ERROR)
            self._drain()
            return
        self._expect(stream_id <= self._seen_id, "WINDOW_UPDATE for a stream that was never opened")
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        stream.send_window_bytes += more_bytes
        if more_bytes == 0:
            self._reset(stream_id, frames.PROTOCOL_ERROR)
        elif stream.send_window_bytes > frames.LARGEST_WINDOW_BYTES:
            self._reset(stream_id, frames.FLOW_CONTROL_ERROR)
        else:
            self._flush(stream)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._expect(stream_id == 0, "SETTINGS on a stream")
        self._expect(len(payload) % 6 == 0, "SETTINGS of another length", frames.FRAME_SIZE_ERROR)
        self._greeted = True
        if flags & frames.ACK:
            return
        self._settings_frames += 1
        if self._settings_frames > MAX_SETTINGS_FRAMES:
            raise ConnectionFailed(frames.ENHANCE_YOUR_CALM, "settings without end")
        window_bytes = self._peer_window_bytes
        for at in range(0, len(payload), 6):
            name = int.from_bytes(payload[at : at + 2], "big")
            value = int.from_bytes(payload[at + 2 : at + 6], "big")
            if name == frames.INITIAL_WINDOW_SIZE:
                self._expect(value <= frames.LARGEST_WINDOW_BYTES, "a window too large", frames.FLOW_CONTROL_ERROR)
                window_bytes = value
            elif name == frames.MAX_FRAME_SIZE:
                in_bounds = frames.DEFAULT_FRAME_BYTES <= value <= frames.LARGEST_FRAME_BYTES
                self._expect(in_bounds, "a frame size that cannot be")
                self._peer_frame_bytes = value
            elif name == frames.ENABLE_PUSH:
                self._expect(value <= 1, "ENABLE_PUSH is 0 or 1")
        self._write(frames.frame(frames.SETTINGS, frames.ACK, 0))
        if window_bytes != self._peer_window_bytes:
            self._resize_windows(window_bytes)

    def _resize_windows(self, window_bytes: int) -> None:
        grown_bytes = window_bytes - self._peer_window_bytes
        self._peer_window_bytes = window_bytes
        for stream in list(self._streams.values()):
            stream.send_window_bytes += grown_bytes  # below 0 as well (6.9.2)
            in_bounds = stream.send_window_bytes <= frames.LARGEST_WINDOW_BYTES
            self._expect(in_bounds, "a window too large", frames.FLOW_CONTROL_ERROR)
            self._flush(stream)

    # --- frames out ---

    def send(self, stream: Stream, message: bytes) -> None:
        """A message of a call."""
        if stream.ending is not None or stream.id not in self._streams:
            return
        if not stream.begun:
            stream.begun = True
            self._write(frames.frame(frames.HEADERS, frames.END_HEADERS, stream.id, ANSWER))
        length = len(message)
        size = length + PREFIX_BYTES
        if (
            not stream.waiting
            and size <= stream.send_window_bytes
            and size <= self._send_window_bytes
            and size <= self._peer_frame_bytes
        ):
            stream.send_window_bytes -= size
            self._send_window_bytes -= size
            self._write(_DATA_HEAD.pack(size >> 8, size & 0xFF, frames.DATA, 0, stream.id, 0, length))
            self._output.append(message)
            return
        stream.waiting.append(b"\0" + length.to_bytes(4, "big") + message)
        self._flush(stream)

    def end(self, stream: Stream, last: bytes) -> None:
        """The trailers of a call."""
        if stream.ending is not None or stream.id not in self._streams:
            return
        stream.ending = last if stream.begun else ANSWER + last
        stream.begun = True
        if not stream.waiting:
            self._finish(stream)

    def _drain(self) -> None:
        while self._blocked and self._send_window_bytes > 0:
            self._flush(self._blocked.pop(next(iter(self._blocked))))

    def _flush(self, stream: Stream) -> None:
        """Send what the windows let through of a stream's answers that wait."""
        if not stream.waiting:
            return
        while stream.waiting:
            piece = stream.waiting[0]
            room = min(stream.send_window_bytes, self._send_window_bytes, self._peer_frame_bytes)
            if room <= 0:
                if self._send_window_bytes <= 0:
                    self._blocked[stream.id] = stream  # else it waits for a window of its own
                return
            if len(piece) > room:
                stream.waiting[0] = piece[room:]
                piece = piece[:room]
            else:
                del stream.waiting[0]
            stream.send_window_bytes -= len(piece)
            self._send_window_bytes -= len(piece)
            self._write(frames.frame(frames.DATA, 0, stream.id, piece))
        self._blocked.pop(stream.id, None)
        if stream.ending is not None:
            self._finish(stream)
        elif stream.unacknowledged_bytes > self._window_bytes // 2:
            self._give_room(stream)

    def _finish(self, stream: Stream) -> None:
        last = stream.ending or b""
        self._write(frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream.id, last))
        self._gone(stream)

    def _gone(self, stream: Stream) -> None:
        """Our side has ended. Where the peer's has not, it need not say the rest (8.1)."""
        if not stream.peer_ended:
            self._write(frames.reset(stream.id, frames.NO_ERROR))
        self._forget(stream.id)

    def _reset(self, stream_id: int, error: int) -> None:
        self._write(frames.reset(stream_id, error))
        self._forget(stream_id)

    def _forget(self, stream_id: int) -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            self._blocked.pop(stream_id, None)
            self._close(stream)

    def _close(self, stream: Stream) -> None:
        call, stream.call = stream.call, None
        if call is None:
            return
        try:
            call.closed()
        except Exception:
            log.exception("a call failed")

    def _write(self, data: bytes) -> None:
        if not self._output and not self._receiving:
            self._output.append(data)
            self._woken()
        else:
            self._output.append(data)
