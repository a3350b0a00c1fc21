"""Cache-aware routing with a radix tree, as in SGLang's router (sgl-router, policies/cache_aware.rs).

While loads are balanced (the busiest is not more than 64 requests and 1.5 times above the idlest): the replica with
the longest match, if it matches more than 30% of the prompt, else the one with the smallest tree. While they aren't:
the fewest requests. Matches are the engines' true caches instead of an approximate tree; the size of a tree is what
was inserted into it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim.policies.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.engine import Engine
    from sim.turn import Visit

CACHE_THRESHOLD: Final = 0.3
BALANCE_ABS: Final = 64
BALANCE_REL: Final = 1.5


class Radix(Policy):
    name = "radix"

    def start(self, engines: Sequence[Engine]) -> None:
        super().start(engines)
        self._tree_tokens = [0] * len(engines)

    def choose(self, visit: Visit, now_s: float) -> int:
        turn = visit.turn
        matched = [engine.cached_prefix_tokens(turn) for engine in self.engines]
        in_flight = [engine.in_flight for engine in self.engines]
        idlest, busiest = min(in_flight), max(in_flight)
        if busiest - idlest > BALANCE_ABS and busiest > BALANCE_REL * idlest:
            chosen = in_flight.index(idlest)
        elif max(matched) > CACHE_THRESHOLD * turn.prompt_tokens:
            chosen = matched.index(max(matched))
        else:
            chosen = self._tree_tokens.index(min(self._tree_tokens))
        self._tree_tokens[chosen] += turn.prompt_tokens - matched[chosen]
        return chosen
