"""The article's code, literally: a ring on the session id, else on the first 512 bytes; above 16 the least loaded.

MD5 ring with 64 virtual nodes named "replica#vnode0" and so on, and loads from a heartbeat every 500 ms, so that all
requests between two heartbeats see the same loads.
"""

from __future__ import annotations

from bisect import bisect_left
from hashlib import md5
from typing import TYPE_CHECKING, Final

from sim.policies.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.engine import Engine
    from sim.turn import Visit

VNODES: Final = 64
SATURATION: Final = 16


class SeedRing(Policy):
    name = "seed_ring"

    def start(self, engines: Sequence[Engine]) -> None:
        super().start(engines)
        self._loads = [0] * len(engines)
        self._ring = sorted(
            (_hash(f"replica-{i}#vnode{vnode}".encode()), i) for i in range(len(engines)) for vnode in range(VNODES)
        )

    def choose(self, visit: Visit, now_s: float) -> int:
        features = visit.turn.features
        named = features.conversation_source != "prompt" and features.conversation_key
        preferred = self._place(named or features.rungs[0].signature)
        if self._loads[preferred] > SATURATION:
            return self._loads.index(min(self._loads))
        return preferred

    def poll(self, now_s: float) -> None:
        self._loads = [engine.in_flight for engine in self.engines]

    def _place(self, key: bytes) -> int:
        index = bisect_left(self._ring, (_hash(key.hex().encode()), 0))
        return self._ring[index % len(self._ring)][1]


def _hash(data: bytes) -> int:
    return int(md5(data, usedforsecurity=False).hexdigest(), 16)
