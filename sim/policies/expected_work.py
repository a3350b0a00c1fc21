"""Ours: the real `extproc.core`, shown what it would see in production."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, ClassVar

from extproc.core.replica import EngineLoad, Replica
from extproc.core.router import Router, RouterSettings
from sim.policies.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.lease import Lease
    from sim.engine import Engine
    from sim.turn import Visit


class ExpectedWork(Policy):
    """routers: independent instances; each request meets one of them at random.

    first_token_signal: whether answers' headers come with the first token and tell the engine's counts.
    """

    name: ClassVar[str] = "expected_work"

    def __init__(
        self,
        settings: RouterSettings | None = None,
        routers: int = 1,
        first_token_signal: bool = True,
        seed: int = 0,
    ) -> None:
        self.routers = [Router(settings) for _ in range(routers)]
        self._signal = first_token_signal
        self._random = random.Random(seed)
        self._leases: dict[Visit, tuple[Router, Lease]] = {}
        self._index: dict[str, int] = {}

    def start(self, engines: Sequence[Engine]) -> None:
        super().start(engines)
        replicas = [Replica(f"replica-{i}", f"10.0.{i // 250}.{i % 250 + 1}:8000") for i in range(len(engines))]
        self._index = {replica.id: i for i, replica in enumerate(replicas)}
        for router in self.routers:
            router.set_members(replicas, 0.0)

    def choose(self, visit: Visit, now_s: float) -> int:
        router = self.routers[0] if len(self.routers) == 1 else self._random.choice(self.routers)
        decision = router.decide(visit.turn.features, now_s)
        assert decision.lease is not None and decision.replica_id is not None
        self._leases[visit] = router, decision.lease
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
