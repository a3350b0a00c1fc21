"""The outcome of routing one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from extproc.core.lease import Lease
    from extproc.core.load import ReplicaLoad


class Reason(StrEnum):
    """Why this replica. One word per decision, the same in spans, metrics and `explain`."""

    SESSION = "session"
    """The client's session, on the replica that holds it (or, first seen, on its place on the ring)."""
    PREFIX = "prefix"
    """No session; the replica holds the prompt's beginning."""
    COLD = "cold"
    """Nobody is known to hold any of it: ring order among the least work."""
    SPREAD = "spread"
    """The home was below the saturation line, but another replica would answer sooner."""
    SPILLOVER = "spillover"
    """The home was past the saturation line."""
    NO_AFFINITY = "no_affinity"
    """The request says nothing to be near to (GET, unknown API, unreadable body): least work."""
    SHED = "shed"
    """Every replica is past the saturation line and shedding is on: 429."""
    NO_REPLICA = "no_replica"
    """No replica can serve the request: 503."""


Weighed = tuple["ReplicaLoad", int, float, float, int]
"""A candidate while it is weighed: (load, matched_bytes, uncached_tokens, work_tokens, in_flight)."""


class Candidate(NamedTuple):
    """One replica that was weighed.

    uncached_tokens: what it would have to prefill for this request.
    work_tokens: its expected work, this request included, divided by its weight.
    """

    replica_id: str
    endpoint: str
    uncached_tokens: int
    work_tokens: float
    in_flight: int


@dataclass(slots=True)
class Decision:
    """Where a request goes, and what was weighed.

    lease: held until the stream ends (`Router.finish`); None when nothing was chosen (SHED, NO_REPLICA).
    endpoint: "ip:port", None when nothing was chosen.
    primary: replica id that the ring names first, None without affinity.
    matched_bytes: the part of the prompt that the chosen replica is thought to hold.
    retry_after_s: for SHED only.
    """

    reason: Reason
    lease: Lease | None
    endpoint: str | None
    replica_id: str | None
    primary: str | None
    weighed: Sequence[Weighed]
    matched_bytes: int
    prompt_tokens: int
    stale: bool
    membership_version: int
    retry_after_s: float | None = None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All that was weighed, in order of preference; made when asked for."""
        return tuple(
            Candidate(load.replica.id, load.replica.endpoint, int(uncached_tokens), work_tokens, in_flight)
            for load, _, uncached_tokens, work_tokens, in_flight in self.weighed
        )
