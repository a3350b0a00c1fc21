"""Link: messages between two processes over a Unix stream socket, in order; a socket may travel with one.

A message is a tuple of plain values, its kind first. Both ends are the same program, so `marshal` will do: a request's
features take 5 us to write and 8 to read, a third of what pickle needs.
"""

from __future__ import annotations

import asyncio
import marshal
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

Message = tuple[Any, ...]

LATER_S: Final = 0.001
"""What can wait does so for company: waking the other end costs as much as half a decision."""

_LENGTH: Final = struct.Struct("!I")
_READ_BYTES: Final = 64 * 1024
_DESCRIPTOR: Final = struct.Struct("i")
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_DESCRIPTOR.size)
"""Of one socket: Linux hands over those of one message at a time."""


class Link:
    """One end, on an event loop. It never blocks: what the other end does not take yet is kept here.

    readable: called when there is something to `take`, or the end to be seen.
    ended: the other end is gone, and all that it said has been taken. What is sent then is lost.
    """

    def __init__(self, end: socket.socket, readable: Callable[[], None]) -> None:
        end.setblocking(False)
        self.ended = False
        self._end = end
        self._outgoing: deque[tuple[bytearray, socket.socket | None]] = deque()
        self._incoming = bytearray()
        self._sockets: deque[socket.socket] = deque()
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._waits_to_write = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, readable)

    def close(self) -> None:
        """Idempotent."""
        if self._end.fileno() < 0:
            return
        self.ended = True
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)
        self._end.close()
        for _, passenger in self._outgoing:
            if passenger is not None:
                passenger.close()
        self._outgoing.clear()
        while (passenger := self.socket()) is not None:
            passenger.close()

    # --- out ---

    def post(self, message: Message, passenger: socket.socket | None = None) -> None:
        """Send with all else that is posted in this turn of the loop. `passenger` is given away."""
        self._put(message, passenger)
        if self._soon is None:
            self._soon = self._loop.call_soon(self._flush)

    def post_later(self, message: Message) -> None:
        """Send with what is posted next, or after `LATER_S`."""
        self._put(message, None)
        if self._soon is None and self._later is None:
            self._later = self._loop.call_later(LATER_S, self._flush)

    def _put(self, message: Message, passenger: socket.socket | None) -> None:
        if self.ended:
            if passenger is not None:
                passenger.close()
            return
        content = marshal.dumps(message)
        frame = _LENGTH.pack(len(content)) + content
        if passenger is None and self._outgoing:
            self._outgoing[-1][0].extend(frame)
        else:
            self._outgoing.append((bytearray(frame), passenger))

    def _flush(self) -> None:
        self._soon = None
        if self._later is not None:
            self._later.cancel()
            self._later = None
        try:
            while self._outgoing and not self.ended:
                self._send_first()
        except BlockingIOError:
            self._wait_to_write(True)
            return
        except OSError:  # it is gone; whoever reads learns so
            pass
        self._wait_to_write(False)

    def _send_first(self) -> None:
        data, passenger = self._outgoing[0]
        if passenger is None:
            sent = self._end.send(data)
        else:
            sent = socket.send_fds(self._end, [data], [passenger.fileno()])
            passenger.close()
        if sent == len(data):
            self._outgoing.popleft()
        else:
            self._outgoing[0] = (data[sent:], None)

    def _wait_to_write(self, wait: bool) -> None:
        if wait is self._waits_to_write or self.ended:
            return
        self._waits_to_write = wait
        if wait:
            self._loop.add_writer(self._end, self._flush)
        else:
            self._loop.remove_writer(self._end)

    # --- in ---

    def take(self) -> list[Message]:
        """All that has arrived."""
        while self._read():
            pass
        return self._complete()

    def _read(self) -> bool:
        """Whether there may be more."""
        if self.ended:
            return False
        try:
            data, ancillary, _, _ = self._end.recvmsg(_READ_BYTES, _ANCILLARY_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data, ancillary = b"", []
        self.ended = not data
        self._incoming += data
        for _, _, descriptor in ancillary:
            self._sockets.append(socket.socket(fileno=_DESCRIPTOR.unpack(descriptor)[0]))
        return len(data) == _READ_BYTES

    def _complete(self) -> list[Message]:
        buffer, messages, at = self._incoming, [], 0
        while len(buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, at)
            end = at + _LENGTH.size + length
            if end > len(buffer):
                break
            messages.append(marshal.loads(buffer[at + _LENGTH.size : end]))
            at = end
        del buffer[:at]
        return messages

    def socket(self) -> socket.socket | None:
        """The socket that came with a message; call it once for each that has one, in their order.

        None where it did not come: this process has no descriptor left, and the kernel has closed it.
        """
        return self._sockets.popleft() if self._sockets else None
