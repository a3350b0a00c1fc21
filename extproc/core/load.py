"""The load of one replica: requests in flight, and prefill that is still to be done.

Work is counted in uncached prompt tokens: a request that finds its prompt in the cache costs almost nothing, so
counting requests would call a replica of short follow-ups busy and one with a single long prompt idle.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from extproc.core.lease import Lease
    from extproc.core.replica import EngineLoad, Replica
    from extproc.core.settings import RouterSettings

LEARNING_MEMORY: Final = 0.95
"""Weight of the past at each observation: an average over about the last 20."""
SPEED_STEP: Final = 0.02
"""By how much a speed that is judged by the engine's queue is corrected at a time: at a reading every 500 ms, a
speed that is off by half is right after 20 s of queueing."""
MIN_SAMPLE_TOKENS: Final = 256
"""Shorter prefills say more of overheads than of speed."""
SLOWEST_START: Final = 0.1
"""Share of its weight that a replica has at the moment it joins."""


class ReplicaLoad:
    """What this router knows of one replica's load.

    serial: unique in the router's life, so that nothing is inherited by a later replica of the same id or port.
    in_flight: own open leases. others_in_flight: what the engine reports beyond them (other routers' requests).
    others_tokens: prefill of theirs that waits, as far as the engine's queue tells.
    computed_tokens: all that was ever sent here to be computed; the clock of the cache's own LRU.
    signals_first_token: this engine's answers tell when a prefill ended, so the ledger need not guess.
    waiting_tokens: outstanding prefill, and what the requests in flight cost it. pace: 1 / (weight x warmth), where
        a replica that is new to a running fleet is not warm yet.
    """

    __slots__ = (
        "_busy_s",
        "_busy_tokens",
        "_drained_s",
        "_joined_s",
        "_last_first_token_s",
        "_ledger",
        "_open",
        "_settings",
        "_typical_tokens",
        "_warm",
        "capacity_tokens",
        "computed_tokens",
        "engine",
        "engine_s",
        "in_flight",
        "ledger_tokens",
        "others_in_flight",
        "others_tokens",
        "pace",
        "replica",
        "serial",
        "signals_first_token",
        "waiting_tokens",
    )

    def __init__(self, replica: Replica, serial: int, settings: RouterSettings, now_s: float, warm: bool) -> None:
        self.replica = replica
        self.serial = serial
        self.in_flight = 0
        self.others_in_flight = 0
        self.others_tokens = 0.0
        self.ledger_tokens = 0.0
        self.computed_tokens = 0.0
        self.capacity_tokens = settings.kv_capacity_tokens
        self.signals_first_token = False
        self.engine: EngineLoad | None = None
        self.engine_s = now_s
        self._settings = settings
        self._joined_s = -math.inf if warm else now_s
        self._warm = False
        self._open: dict[Lease, None] = {}
        self._ledger: dict[Lease, float] = {}  # in the order of arrival, as the engine works it off
        self._drained_s = now_s
        self._last_first_token_s = now_s
        self._busy_tokens = settings.prefill_tokens_per_s
        self._busy_s = 1.0
        self._typical_tokens = 0.0
        self.refresh(now_s)

    @property
    def prefill_tokens_per_s(self) -> float:
        """The replica's prefill speed, learned from first tokens or, without them, from the engine's queue."""
        return self._busy_tokens / self._busy_s

    @property
    def queued(self) -> int:
        """Own requests whose first token is still to come."""
        return len(self._ledger)

    @property
    def total_in_flight(self) -> int:
        return self.in_flight + self.others_in_flight

    def become(self, replica: Replica, now_s: float) -> None:
        """Take in what the membership says of it now."""
        self.replica = replica
        self._warm = False  # for the pace to follow its weight
        self.refresh(now_s)

    def start_slowly(self, now_s: float) -> None:
        """Count as new from now on: the idle look of a replica that comes back says nothing of its speed."""
        self._joined_s = now_s
        self._warm = False

    def refresh(self, now_s: float) -> None:
        """Bring `waiting_tokens` and `pace` up to date: at every change, and by the clock."""
        in_flight = self.in_flight + self.others_in_flight
        self.waiting_tokens = self.ledger_tokens + self.others_tokens + self._settings.decode_tokens * in_flight
        if not self._warm:
            self._warm_up(now_s)

    def _warm_up(self, now_s: float) -> None:
        age_s, slow_start_s = now_s - self._joined_s, self._settings.slow_start_s
        self._warm = age_s >= slow_start_s
        warmth = 1.0 if self._warm else max(SLOWEST_START, age_s / slow_start_s)
        self.pace = 1.0 / (self.replica.weight * warmth)

    def work_tokens(self, uncached_tokens: float = 0.0) -> float:
        """Expected work before a request with so many uncached tokens has its first token, at this replica's pace."""
        return (self.waiting_tokens + uncached_tokens) * self.pace

    def is_at_rest(self, now_s: float) -> bool:
        """Nothing about it changes by time alone."""
        return not self._ledger and self._warm and not self._is_stale(now_s)

    def take(self, lease: Lease, now_s: float) -> None:
        self.drain(now_s)
        uncached_tokens = lease.uncached_tokens
        self.in_flight += 1
        self._open[lease] = None
        self._ledger[lease] = uncached_tokens
        self.ledger_tokens += uncached_tokens
        self.computed_tokens += uncached_tokens
        self._typical_tokens += (1.0 - LEARNING_MEMORY) * (uncached_tokens - self._typical_tokens)
        self.refresh(now_s)

    def first_token(self, lease: Lease, now_s: float) -> None:
        """The lease's prefill has ended: exact, where the ledger would have guessed."""
        if lease.streamed:
            self.signals_first_token = True
            self._learn_speed(lease, now_s)
            self._last_first_token_s = now_s
        self.drain(now_s)
        if lease in self._ledger:
            # Prefill is first come, first served, so what was to be guessed of earlier ones is known now.
            for earlier in list(self._ledger):
                if earlier is lease:
                    break
                if not earlier.streamed:
                    self._settle(earlier)
            self._settle(lease)
        self.refresh(now_s)

    def release(self, lease: Lease, now_s: float) -> None:
        self.drain(now_s)
        self.in_flight -= 1
        del self._open[lease]
        self._settle(lease)
        self.refresh(now_s)

    def drain(self, now_s: float) -> None:
        """Take from the ledger what the replica has prefilled since the last look.

        Oldest first. An entry whose first token will be signalled may shrink to nothing, but holds up those behind it
        until it is: the replica is slower than was thought.
        """
        elapsed_s, self._drained_s = now_s - self._drained_s, now_s
        if not self._ledger or elapsed_s <= 0:
            return
        budget = elapsed_s * self.prefill_tokens_per_s
        settled = []
        for lease, left in self._ledger.items():
            done = min(left, budget)
            budget -= done
            self.ledger_tokens = max(0.0, self.ledger_tokens - done)
            self._ledger[lease] = left - done
            if done < left or (self.signals_first_token and lease.streamed):
                break
            settled.append(lease)
        for lease in settled:
            self._settle(lease)

    def pass_time(self, now_s: float) -> bool:
        """Drain the ledger, drop old figures, warm up. True where the engine's figures are too old to act on."""
        self.drain(now_s)
        stale = self._is_stale(now_s)
        if stale:
            self.others_in_flight, self.others_tokens = 0, 0.0
        self.refresh(now_s)
        return stale

    def _is_stale(self, now_s: float) -> bool:
        return self.engine is not None and now_s - self.engine_s > self._settings.load_stale_s

    def _settle(self, lease: Lease) -> None:
        left = self._ledger.pop(lease, 0.0)
        # Sums of floats leave dust, on either side of zero.
        self.ledger_tokens = max(0.0, self.ledger_tokens - left) if self._ledger else 0.0

    def _learn_speed(self, lease: Lease, now_s: float) -> None:
        began_s = max(lease.decided_s, self._last_first_token_s)
        took_s = now_s - began_s
        if lease.uncached_tokens >= MIN_SAMPLE_TOKENS and took_s > 0:
            self._busy_tokens = LEARNING_MEMORY * self._busy_tokens + lease.uncached_tokens
            self._busy_s = LEARNING_MEMORY * self._busy_s + took_s

    def adopt(self, settings: RouterSettings) -> None:
        """Go by new settings from the next `refresh` on; what was learned stays."""
        self._settings = settings
        self._warm = False

    def report(self, engine: EngineLoad, now_s: float) -> None:
        """The engine's own figures. What it has beyond our leases came by other routers."""
        self.engine = engine
        self.engine_s = now_s
        self.others_in_flight = max(0, engine.running + engine.waiting - self.in_flight)
        if engine.capacity_tokens is not None and engine.capacity_tokens > 0:
            self.capacity_tokens = engine.capacity_tokens
        # The queue is taken to hold as much of ours as the replica does, and others' requests to be like ours.
        waiting = max(0, engine.waiting)
        own_waiting = waiting * self.in_flight // max(1, self.total_in_flight)
        self.others_tokens = (waiting - own_waiting) * self._typical_tokens
        if not self.signals_first_token:
            self.drain(now_s)
            self._correct(own_waiting)
        self.refresh(now_s)

    def _correct(self, waiting: int) -> None:
        """Where no first token is signalled: by the engine's own queue, correct the ledger and the speed behind it.

        The last that came are those that wait, and nothing of them is done. The ledger ought to have had just them
        and one at work. With fewer in it, prefill was thought too fast; with more, too slow.
        """
        thought = max(0, len(self._ledger) - 1)
        if waiting > thought:
            self._busy_s *= 1.0 + SPEED_STEP
        elif waiting < thought:
            self._busy_s /= 1.0 + SPEED_STEP
        for lease in reversed([*islice(reversed(self._open), waiting)]):
            self.ledger_tokens += lease.uncached_tokens - self._ledger.pop(lease, 0.0)
            self._ledger[lease] = lease.uncached_tokens
