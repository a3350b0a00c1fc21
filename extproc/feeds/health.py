"""Health: each replica is asked at `/-/healthz`, and at once when an answer through the data plane looks bad.

Envoy's override_host sends to the named replica whatever its health, so it is here that a bad one must be noticed.
Ray Serve itself takes its time: it stops listing a replica whose health check fails after 6.7 s, while the replica's
own `/-/healthz` says so after 2.1 s.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from extproc.feeds.rounds import Rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from extproc.core.decision import Decision
    from extproc.core.features import Features
    from extproc.core.replica import Replica
    from extproc.core.request import Request
    from extproc.feeds.connection import Connection
    from extproc.picker import ResponseStart

SUSPICIOUS: Final = frozenset({500, 502, 503, 504})
OUR_TROUBLE: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""No file descriptor is left for the probe, which says nothing about the replica."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Health probes.

    enabled: off where something else takes bad replicas out of the membership.
    path: on each replica's port. Ray Serve answers at "/-/healthz", vLLM alone at "/health". A replica that does not
        know the path (404) is alive.
    probe_s: between two looks at a replica. timeout_s: for each answer; an engine at its limit still answers
        `/-/healthz` in milliseconds, so one that does not for so long has stopped.
    """

    enabled: bool = True
    path: str = "/-/healthz"
    probe_s: float = 0.5
    timeout_s: float = 2.0

    def __post_init__(self) -> None:
        if not (self.probe_s > 0 and self.timeout_s > 0):
            raise ValueError("probe_s and timeout_s must be above 0")
        if not self.path.startswith("/"):
            raise ValueError('path must begin with "/"')


class ReplicaHealth:
    """Probes all members until cancelled; also a DecisionObserver, for the hints in answers.

    unwell: ids of those whose last probe was bad. A server error, a refused connection or no answer in time is bad.
    members: who is to be asked. changed: called after each change of `unwell`.
    """

    def __init__(
        self, settings: HealthSettings, members: Callable[[], Iterable[Replica]], changed: Callable[[], None]
    ) -> None:
        self.unwell: frozenset[str] = frozenset()
        self._path = settings.path
        self._members = members
        self._changed = changed
        self._rounds = Rounds(settings.probe_s, settings.timeout_s, members, self._ask, self._failed)

    async def run(self) -> None:
        await self._rounds.run()

    async def _ask(self, replica: Replica, connection: Connection) -> None:
        page = await connection.get(self._path)
        if page.status >= 500:
            self._note(replica, f"{page.status} {page.body[:100].decode(errors='replace')}".rstrip())
        else:
            self._note(replica, None)

    def _failed(self, replica: Replica, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno in OUR_TROUBLE:
            return
        self._note(replica, f"{type(error).__name__} {error}".rstrip())

    def _note(self, replica: Replica, trouble: str | None) -> None:
        if (trouble is not None) == (replica.id in self.unwell):
            return
        members = {member.id for member in self._members()}
        if replica.id not in members:
            return
        self.unwell &= members
        if trouble is not None:
            self.unwell |= {replica.id}
            log.warning("replica unwell", replica=replica.id, endpoint=replica.endpoint, error=trouble)
        else:
            self.unwell -= {replica.id}
            log.info("replica well again", replica=replica.id, endpoint=replica.endpoint)
        self._changed()

    # --- as an observer of decisions ---

    def decided(self, request: Request, features: Features, decision: Decision, took_s: float) -> None:
        pass

    def response_started(self, decision: Decision, start: ResponseStart, since_decision_s: float) -> None:
        """A server error, or an answer by another replica than the chosen one: look at the chosen one now."""
        elsewhere = start.served_endpoint is not None and start.served_endpoint != decision.endpoint
        if start.status not in SUSPICIOUS and not elsewhere:
            return
        for replica in self._members():
            if replica.id == decision.replica_id:
                self._rounds.ask_now(replica)

    def finished(self, decision: Decision, since_decision_s: float) -> None:
        pass
