"""Uncached prefill tokens x batch size, the least of: LMetric (arXiv 2603.15202), which has no knob to turn.

Tokens include those outstanding, the batch this request; queues and caches are the engines' own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.policies.policy import Policy

if TYPE_CHECKING:
    from sim.turn import Visit


class WorkTimesBatch(Policy):
    name = "work_times_batch"

    def choose(self, visit: Visit, now_s: float) -> int:
        turn = visit.turn
        products = [
            (engine.outstanding_tokens(now_s) + turn.prompt_tokens - engine.cached_prefix_tokens(turn))
            * (engine.in_flight + 1)
            for engine in self.engines
        ]
        return products.index(min(products))
