"""How good any routing could be: one cache as large as all replicas' together, and a free replica for every request.

A bound for LRU caches, not a policy: no request waits and no prompt is kept twice.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, NamedTuple

from serve_app.engine.cache import PrefixCache

if TYPE_CHECKING:
    from sim.engine import EngineModel
    from sim.turn import Turn
    from sim.workload import Workload


class Bound(NamedTuple):
    hit_rate: float
    ttft_mean_s: float


def bound(workload: Workload, replicas: int, model: EngineModel) -> Bound:
    """Turns in the order in which they would be sent, each answered after its own prefill and undisturbed decode."""
    size = workload.block_tokens
    cache = PrefixCache(replicas * model.kv_tokens // size)
    serial = itertools.count()
    due: list[tuple[float, int, Turn]] = [(turn.at_s, next(serial), turn) for turn in workload.turns]
    heapq.heapify(due)
    requests = prompt_tokens = cached_tokens = 0
    waited_s = 0.0
    while due:
        at_s, _, turn = heapq.heappop(due)
        context = turn.prompt_tokens + turn.output_tokens
        blocks = cache.acquire(turn.blocks[: (turn.prompt_tokens - 1) // size], -(-context // size))
        if blocks is None:
            raise ValueError(f"a turn of {context} tokens does not fit into the cache")
        cached = blocks.found * size
        cache.publish(blocks, turn.blocks[: (context - 1) // size])
        cache.release(blocks)
        ttft_s = model.wait_s(turn.prompt_tokens - cached, 0)
        requests, prompt_tokens, cached_tokens = (
            requests + 1,
            prompt_tokens + turn.prompt_tokens,
            cached_tokens + cached,
        )
        waited_s += ttft_s
        if turn.then is not None:
            decode_s = (turn.output_tokens - 1) * model.step_s(0, context)
            heapq.heappush(due, (at_s + ttft_s + decode_s + turn.then.at_s, next(serial), turn.then))
    return Bound(cached_tokens / prompt_tokens, waited_s / requests)
