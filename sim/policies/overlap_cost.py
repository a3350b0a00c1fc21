"""Overlap cost, as in NVIDIA Dynamo's KV router (docs.nvidia.com/dynamo/design-docs/router-design): the least of

    overlap weight (1.0) x prefill blocks, outstanding and new, less what the cache has + active decode blocks

with the engines' true queues and caches instead of KV events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim.policies.policy import Policy

if TYPE_CHECKING:
    from sim.engine import Engine
    from sim.turn import Turn, Visit

OVERLAP_WEIGHT: Final = 1.0


class OverlapCost(Policy):
    name = "overlap_cost"

    def choose(self, visit: Visit, now_s: float) -> int:
        costs = [self._cost(engine, visit.turn, now_s) for engine in self.engines]
        return costs.index(min(costs))

    @staticmethod
    def _cost(engine: Engine, turn: Turn, now_s: float) -> float:
        uncached = turn.prompt_tokens - engine.cached_prefix_tokens(turn)
        waiting = sum(visit.turn.prompt_tokens for visit in engine.waiting)
        active = engine.cache.held_blocks * engine.block_tokens + waiting + turn.prompt_tokens
        return OVERLAP_WEIGHT * (engine.outstanding_tokens(now_s) + uncached) + active
