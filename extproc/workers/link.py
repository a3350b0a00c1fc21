"""Link: messages between two processes over a Unix stream socket, in order; a socket may travel with one.

A message is a tuple of plain values, its kind first. Both ends are the same program, so `marshal` will do: a request's
features take 5 us to write and 8 to read, a third of what pickle needs.
"""

from __future__ import annotations

import asyncio
import marshal
import select
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

Message = tuple[Any, ...]

POST_DELAY_S: Final = 0.001
"""What is posted waits so long for company: waking the other end costs as much as half a decision."""

_LENGTH: Final = struct.Struct("!I")
_READ_BYTES: Final = 64 * 1024
_TIMEVAL: Final = struct.Struct("ll")
"""As Linux has it."""
_DESCRIPTOR: Final = struct.Struct("i")
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_DESCRIPTOR.size)
"""Of one socket: Linux hands over those of one message at a time."""


class Link:
    """One end. It never blocks but in `wait`: what the other end does not take yet is kept here.

    patience_s: how long `wait` waits.
    ended: the other end is gone, and all that it said has been taken. What is sent then is lost.
    """

    def __init__(self, end: socket.socket, patience_s: float = 1.0) -> None:
        # A blocking socket with a time limit, so that `wait` is one system call; all others are told not to wait.
        end.setblocking(True)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(patience_s))
        self.ended = False
        self._patience_s = patience_s
        self._end = end
        self._outgoing: deque[tuple[bytearray, socket.socket | None]] = deque()
        self._incoming = bytearray()
        self._sockets: deque[socket.socket] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waits_to_write = False

    def follow(self, readable: Callable[[], None]) -> None:
        """From now on have the running loop call `readable` when there is something to `take`, and the end is."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._end, readable)

    def close(self) -> None:
        """Idempotent."""
        self.ended = True
        if self._loop is not None and self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
        self._end.close()
        for _, passenger in self._outgoing:
            if passenger is not None:
                passenger.close()
        self._outgoing.clear()
        while self._sockets:
            self.socket().close()
        if self._timer is not None:
            self._timer.cancel()

    # --- out ---

    def post(self, message: Message, passenger: socket.socket | None = None) -> None:
        """Send within `POST_DELAY_S`, with whatever else is sent by then. `passenger` is given away."""
        self._put(message, passenger)
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(POST_DELAY_S, self._flush)

    def send(self, message: Message) -> None:
        """Send at once, behind what was posted."""
        self._put(message, None)
        self._flush()

    def _put(self, message: Message, passenger: socket.socket | None) -> None:
        content = marshal.dumps(message)
        frame = _LENGTH.pack(len(content)) + content
        if passenger is None and self._outgoing:
            self._outgoing[-1][0].extend(frame)
        else:
            self._outgoing.append((bytearray(frame), passenger))

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
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
            sent = self._end.send(data, socket.MSG_DONTWAIT)
        else:
            # Not socket.send_fds, which forgets its flags in Python 3.11.
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(passenger.fileno()))
            sent = self._end.sendmsg([data], [rights], socket.MSG_DONTWAIT)
            passenger.close()
        if sent == len(data):
            self._outgoing.popleft()
        else:
            self._outgoing[0] = (data[sent:], None)

    def _wait_to_write(self, wait: bool) -> None:
        if wait is self._waits_to_write or self._loop is None:
            return
        self._waits_to_write = wait
        if wait:
            self._loop.add_writer(self._end, self._flush)
        else:
            self._loop.remove_writer(self._end)

    # --- in ---

    def take(self) -> list[Message]:
        """All that has arrived."""
        while self._read(socket.MSG_DONTWAIT):
            pass
        return self._complete()

    def wait(self) -> list[Message]:
        """Block until something arrives, and take it. May be nothing: at the end, in time, half of a message."""
        if self._outgoing:
            self._wait_to_send()
        else:
            self._read(0)
        return self._complete()

    def _read(self, flags: int) -> bool:
        """Whether there may be more."""
        if self.ended:
            return False
        try:
            data, ancillary, _, _ = self._end.recvmsg(_READ_BYTES, _ANCILLARY_BYTES, flags)
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

    def socket(self) -> socket.socket:
        """The socket that came with a message; call it once for each that has one, in their order."""
        return self._sockets.popleft()

    def _wait_to_send(self) -> None:
        poll = select.poll()
        poll.register(self._end, select.POLLIN | select.POLLOUT)
        for _, event in poll.poll(self._patience_s * 1000):
            if event & select.POLLOUT:
                self._flush()
            if event & ~select.POLLOUT:
                self._read(socket.MSG_DONTWAIT)


def _timeval(time_s: float) -> bytes:
    return _TIMEVAL.pack(int(time_s), round(time_s % 1 * 1e6))
