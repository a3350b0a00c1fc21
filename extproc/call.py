"""What a call is to the service that answers it: messages in, messages out, no coroutine between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

# Status codes (grpc/doc/statuscodes.md).
OK = 0
UNKNOWN = 2
INVALID_ARGUMENT = 3
NOT_FOUND = 5
RESOURCE_EXHAUSTED = 8
UNIMPLEMENTED = 12


class Answering(Protocol):
    """A call's way back to its caller. After its end all is ignored."""

    def send(self, message: bytes) -> None: ...

    def end(self, status: int = OK, message: str = "") -> None: ...


class Call(Protocol):
    """One call. What it raises ends it with UNKNOWN, and nothing else."""

    def received(self, message: bytes) -> None:
        """One message of the caller."""

    def half_closed(self) -> None:
        """The caller has no more to say, and waits for the end."""

    def closed(self) -> None:
        """It is over, whichever way. Called once, and last."""


class Service(Protocol):
    """Begins a call. metadata: its headers, names in lower case."""

    def __call__(self, answering: Answering, metadata: Mapping[str, str]) -> Call: ...
