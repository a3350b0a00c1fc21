"""The admin port while no file descriptor is left: in a process of its own, whose limit can be lowered."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, resource, socket
from extproc.admin.listener import Listener

listener = Listener(socket.AF_INET)
listener.bind(("127.0.0.1", 0))
listener.listen()
crowd = [socket.create_connection(listener.getsockname(), timeout=10) for _ in range(3)]
free = os.dup(0)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))  # not one more
for sent_away in crowd[:2]:
    try:
        listener.accept()
    except BlockingIOError:
        assert sent_away.recv(1) == b""
    else:
        raise AssertionError("there should have been no descriptor")
crowd[0].close()
served, _ = listener.accept()
served.sendall(b"here")
assert crowd[2].recv(4) == b"here"
"""


def test_whoever_finds_no_descriptor_is_sent_away_at_once() -> None:
    """And not 2,048 tracebacks later (asyncio's own answer, which stopped the event loop for seconds)."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
