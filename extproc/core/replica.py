"""A replica as the router knows it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine behind one address.

    id: stable for the replica's life and never reused (Ray Serve's replica id); it seeds the ring.
    endpoint: "ip:port" that Envoy can send to; may be reused by another replica later.
    models: the model names it serves; empty: any.
    weight: relative speed, 1.0 = the fleet's ordinary replica.
    draining: finishes what it has and gets nothing new.
    route_prefix: the paths that it answers begin so (a Ray Serve application's `route_prefix`); "": all.

    Raises ValueError for a weight that is not above 0 and finite.
    """

    id: str
    endpoint: str
    models: frozenset[str] = field(default_factory=frozenset)
    weight: float = 1.0
    draining: bool = False
    route_prefix: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"replica {self.id}: weight must be above 0 and finite, not {self.weight}")


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One reading of a replica's own metrics. Counters are cumulative since the engine's start.

    kv_usage: 0..1. capacity_tokens: size of its KV cache. None: the engine does not say.
    """

    running: int
    waiting: int
    kv_usage: float | None = None
    capacity_tokens: int | None = None
    prompt_tokens_computed: int | None = None
    prompt_tokens_cached: int | None = None
