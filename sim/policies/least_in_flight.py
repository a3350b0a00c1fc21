"""Least requests in flight, ties at random. Envoy's LEAST_REQUEST with a full scan; Ray Serve's power of two
choices samples the same figure."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from sim.policies.policy import Policy

if TYPE_CHECKING:
    from sim.turn import Visit


class LeastInFlight(Policy):
    name = "least_in_flight"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, visit: Visit, now_s: float) -> int:
        least = min(engine.in_flight for engine in self.engines)
        return self._random.choice([i for i, engine in enumerate(self.engines) if engine.in_flight == least])
