"""Round robin: each replica in its turn. The default of most load balancers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.policies.policy import Policy

if TYPE_CHECKING:
    from sim.turn import Visit


class RoundRobin(Policy):
    name = "round_robin"

    def __init__(self) -> None:
        self._next = 0

    def choose(self, visit: Visit, now_s: float) -> int:
        self._next += 1
        return (self._next - 1) % len(self.engines)
