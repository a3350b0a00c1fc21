"""Policies of `extproc.core`: the real router, shown what it would see in production."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from extproc.core.replica import EngineLoad, Replica
from extproc.core.router import Router, RouterSettings
from sim.policies.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extproc.core.features import Features
    from extproc.core.lease import Lease
    from sim.engine import Engine
    from sim.turn import Visit


class CoreRouter(Policy):
    """settings: which of the core's policies, and how. name: what the run is called, else that policy's name.

    routers: independent instances; each request meets one of them at random.
    first_token_signal: whether answers' headers come with the first token and tell the engine's counts.
    see: for ablations, what is left of a request's features. ledger: for ablations, whether prefill is counted.
    """

    def __init__(
        self,
        settings: RouterSettings | None = None,
        *,
        name: str | None = None,
        routers: int = 1,
        first_token_signal: bool = True,
        seed: int = 0,
        see: Callable[[Features], Features] | None = None,
        ledger: bool = True,
    ) -> None:
        self.routers = [Router(settings) for _ in range(routers)]
        self.name = name or str(self.routers[0].settings.policy)
        self._signal = first_token_signal
        self._random = random.Random(seed)
        self._see = see
        self._ledger = ledger
        self._leases: dict[Visit, tuple[Router, Lease]] = {}
        self._index: dict[str, int] = {}

    def start(self, engines: Sequence[Engine]) -> None:
        super().start(engines)
        replicas = [Replica(f"replica-{i}", f"10.0.{i // 250}.{i % 250 + 1}:8000") for i in range(len(engines))]
        self._index = {replica.id: i for i, replica in enumerate(replicas)}
        for router in self.routers:
            router.set_members(replicas, 0.0)

    def choose(self, visit: Visit, now_s: float) -> int:
        router = self._random.choice(self.routers)
        features = visit.turn.features
        decision = router.decide(self._see(features) if self._see else features, now_s)
        assert decision.lease is not None and decision.replica_id is not None
        self._leases[visit] = router, decision.lease
        if not self._ledger:
            router.first_token(decision.lease, now_s)
        return self._index[decision.replica_id]

    def first_token(self, visit: Visit, now_s: float) -> None:
        if self._signal:
            router, lease = self._leases[visit]
            router.first_token(lease, now_s, visit.turn.prompt_tokens, visit.cached_tokens)

    def finish(self, visit: Visit, now_s: float) -> None:
        router, lease = self._leases.pop(visit)
        router.finish(lease, now_s)

    def poll(self, now_s: float) -> None:
        for replica_id, index in self._index.items():
            engine = self.engines[index]
            load = EngineLoad(
                running=engine.running,
                waiting=len(engine.waiting),
                kv_usage=engine.kv_usage,
                capacity_tokens=engine.model.kv_tokens,
                prompt_tokens_computed=engine.prompt_tokens - engine.cached_tokens,
                prompt_tokens_cached=engine.cached_tokens,
            )
            for router in self.routers:
                router.set_load(replica_id, load, now_s)

    def tick(self, now_s: float) -> None:
        for router in self.routers:
            router.tick(now_s)

    @property
    def state_entries(self) -> int:
        return max(len(router.memory) for router in self.routers)
