"""Weighted scorers, as llm-d's scheduler combines them: 3 prefix cache + 2 queue + 2 KV-cache use, the highest wins.

After llm-d.ai/docs (architecture, core, router, epp, scheduling) and its default profile: prefix = share of the
prompt's blocks that the replica has; queue = 1 for the shortest queue, 0 for the longest, in between by length; KV =
what is free. Here caches and metrics are the engines' own at this moment, not an index and a scrape.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from sim.policies.policy import Policy

if TYPE_CHECKING:
    from sim.turn import Visit

PREFIX_WEIGHT, QUEUE_WEIGHT, KV_WEIGHT = 3.0, 2.0, 2.0
EQUAL: Final = 1e-9


class Scorers(Policy):
    name = "scorers"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, visit: Visit, now_s: float) -> int:
        turn = visit.turn
        queues = [len(engine.waiting) for engine in self.engines]
        shortest, longest = min(queues), max(queues)
        scores = [
            PREFIX_WEIGHT * engine.cached_prefix_tokens(turn) / turn.prompt_tokens
            + QUEUE_WEIGHT * ((longest - queue) / (longest - shortest) if longest > shortest else 1.0)
            + KV_WEIGHT * (1.0 - engine.kv_usage)
            for engine, queue in zip(self.engines, queues, strict=True)
        ]
        best = max(scores)
        return self._random.choice([i for i, score in enumerate(scores) if score >= best - EQUAL])
