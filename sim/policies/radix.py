"""Cache-aware routing with a radix tree, as SGLang's router and its successor SMG describe it
(github.com/lightseekorg/smg, docs/concepts/routing/cache-aware.md).

While loads are balanced (the busiest is not more than 64 requests and 1.5 times above the idlest): the replica with
the longest match, if it matches more than 30% of the prompt. Else the fewest requests. Matches are the engines' true
caches instead of a tree of what was sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim.policies.policy import Policy

if TYPE_CHECKING:
    from sim.turn import Visit

CACHE_THRESHOLD: Final = 0.3
BALANCE_ABS: Final = 64
BALANCE_REL: Final = 1.5


class Radix(Policy):
    name = "radix"

    def choose(self, visit: Visit, now_s: float) -> int:
        in_flight = [engine.in_flight for engine in self.engines]
        idlest, busiest = min(in_flight), max(in_flight)
        if busiest - idlest <= BALANCE_ABS or busiest <= BALANCE_REL * idlest:
            matched = [engine.cached_prefix_tokens(visit.turn) for engine in self.engines]
            if max(matched) > CACHE_THRESHOLD * visit.turn.prompt_tokens:
                return matched.index(max(matched))
        return in_flight.index(idlest)
