"""A listening socket that outlives a shortage of file descriptors.

asyncio's own answer to "too many open files" is to try all of its backlog, 2,048 times with a traceback each, and to
set as many timers for the next try: the event loop, and with it every decision, stood still for seconds.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, Final

SHORTAGE: Final = frozenset({errno.EMFILE, errno.ENFILE})


class Listener(socket.socket):
    """Hangs up on whoever it has no descriptor for. It keeps one in reserve to be able to."""

    def __init__(self, family: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._reserve = os.open(os.devnull, os.O_RDONLY)

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises BlockingIOError, as if nobody had come, where one had to be sent away."""
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in SHORTAGE:
                raise
        os.close(self._reserve)
        try:
            super().accept()[0].close()
        finally:
            self._reserve = os.open(os.devnull, os.O_RDONLY)
        raise BlockingIOError("no file descriptor is left")

    def close(self) -> None:
        if self.fileno() >= 0:
            os.close(self._reserve)
        super().close()
