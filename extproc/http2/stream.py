"""One stream of a connection: a call, and gRPC's messages in the bytes that the stream carries.

A message has five bytes before it (grpc/doc/PROTOCOL-HTTP2.md): compressed or not, and its length. It may begin and end
anywhere in a frame, and fill many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.call import RESOURCE_EXHAUSTED, UNIMPLEMENTED
from extproc.http2.headers import trailers

if TYPE_CHECKING:
    from extproc.call import Call
    from extproc.http2.connection import Connection

PREFIX_BYTES: Final = 5


class Stream:
    """One call: its message that is not complete, its answers that wait."""

    def __init__(self, connection: Connection, stream_id: int, send_window_bytes: int) -> None:
        self.id = stream_id
        self.call: Call | None = None
        self.begun = False
        self.peer_ended = False
        self.ending: bytes | None = None
        self.waiting: list[bytes] = []
        self.send_window_bytes = send_window_bytes
        self.unacknowledged_bytes = 0
        self._connection = connection
        self._prefix = b""
        self._pieces: list[bytes] = []
        self._missing_bytes = 0

    # --- the service's side ---

    def send(self, message: bytes) -> None:
        self._connection.send(self, message)

    def end(self, status: int = 0, message: str = "") -> None:
        self._connection.end(self, trailers(status, message))

    # --- the connection's side ---

    def data(self, data: bytes, start: int, stop: int, max_message_bytes: int) -> None:
        """A piece of the peer's messages: `data[start:stop]`."""
        if self._prefix:  # one that was cut within its five bytes
            data, self._prefix = self._prefix + data[start:stop], b""
            start, stop = 0, len(data)
        while start < stop and self.call is not None and self.ending is None:
            if not self._missing_bytes:
                if stop - start < PREFIX_BYTES:
                    self._prefix = data[start:stop]
                    return
                length = int.from_bytes(data[start + 1 : start + PREFIX_BYTES], "big")
                if data[start]:
                    self.end(UNIMPLEMENTED, "compressed messages are not understood")
                    return
                if length > max_message_bytes:
                    self.end(RESOURCE_EXHAUSTED, f"a message of {length} bytes, above the limit of {max_message_bytes}")
                    return
                start += PREFIX_BYTES
                if length <= stop - start:
                    self.call.received(data[start : start + length])
                    start += length
                    continue
                self._missing_bytes = length
            taken = min(self._missing_bytes, stop - start)
            self._pieces.append(data[start : start + taken])
            self._missing_bytes -= taken
            start += taken
            if not self._missing_bytes:
                message = b"".join(self._pieces)
                self._pieces.clear()
                self.call.received(message)
