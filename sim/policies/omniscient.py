"""Least expected wait with perfect knowledge: every queue, every cache, every batch, as they are at this moment.

No router can know this. It is no upper bound either: it serves each request as well as it can and does not ask what
that costs the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim.policies.policy import Policy

if TYPE_CHECKING:
    from sim.turn import Visit

TIE_DIGITS: Final = 3
"""Waits that agree to the millisecond are equal; then the replica with fewer requests in flight gets it."""


class Omniscient(Policy):
    name = "omniscient"

    def choose(self, visit: Visit, now_s: float) -> int:
        waits = [
            (round(engine.expected_ttft_s(visit.turn, now_s), TIE_DIGITS), engine.in_flight) for engine in self.engines
        ]
        return waits.index(min(waits))
