"""A program that belongs to the stack: started with a log, ended by its own process id."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING, Self

from demo.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


class Process:
    """A running program; leaving the context ends it."""

    def __init__(self, argv: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> None:
        self._log = log
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                [str(word) for word in argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )

    def wait_ready(self, condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
        """Wait for `condition`. Raises RuntimeError with the end of the log where the program ended instead."""

        def ready_or_dead() -> object:
            if self._popen.poll() is not None:
                raise RuntimeError(f"{self._popen.args!r} ended with {self._popen.returncode}:\n{self.log()[-4000:]}")
            return condition()

        wait_until(ready_or_dead, what, timeout_s)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait(self, timeout_s: float = 10.0) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        return self._popen.wait(timeout_s)

    def kill(self) -> None:
        """End it the hard way, frozen or not."""
        self._popen.kill()
        self._popen.wait()

    def stop(self) -> None:
        """Ask it to end; kill it if it does not."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGCONT)
            self._popen.terminate()
            try:
                self._popen.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
