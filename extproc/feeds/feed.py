"""What every membership feed is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.replica import Replica


class FeedError(Exception):
    """The source did not answer, or not with a membership. The last known one stays in force."""


class MembershipFeed(Protocol):
    """A source that is asked again and again.

    None of the sources pushes (Ray Serve's long poll does not reach outside its cluster), so the interface is one
    question, and whoever asks keeps the time.
    """

    async def read(self) -> Sequence[Replica]:
        """All replicas that can take requests now. Raises FeedError."""

    async def close(self) -> None:
        """Let go of connections."""
