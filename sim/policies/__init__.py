"""Policies to compare, each a small implementation of its published description.

Those that need to know caches or queues look into the engines themselves, which no router can: that favours them.
Only `core_router`, which is ours, is shown what a router sees in production.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from extproc.core.settings import PolicyName, RouterSettings
from sim.policies.core_router import CoreRouter
from sim.policies.least_in_flight import LeastInFlight
from sim.policies.omniscient import Omniscient
from sim.policies.overlap_cost import OverlapCost
from sim.policies.radix import Radix
from sim.policies.round_robin import RoundRobin
from sim.policies.scorers import Scorers
from sim.policies.seed_ring import SeedRing
from sim.policies.work_times_batch import WorkTimesBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.policies.policy import Policy

__all__ = ["POLICIES", "Conditions", "make"]


@dataclasses.dataclass(frozen=True, slots=True)
class Conditions:
    """What the routers under test are given. See `CoreRouter`."""

    settings: RouterSettings = dataclasses.field(default_factory=RouterSettings)
    routers: int = 1
    first_token_signal: bool = True
    seed: int = 0


def _core(policy: PolicyName) -> Callable[[Conditions], Policy]:
    return lambda conditions: CoreRouter(
        dataclasses.replace(conditions.settings, policy=policy),
        routers=conditions.routers,
        first_token_signal=conditions.first_token_signal,
        seed=conditions.seed,
    )


POLICIES: Final[dict[str, Callable[[Conditions], Policy]]] = {
    "round_robin": lambda _: RoundRobin(),
    "least_in_flight": lambda conditions: LeastInFlight(conditions.seed),
    "seed_ring": lambda _: SeedRing(),
    "ring_spillover": _core(PolicyName.RING_SPILLOVER),
    "bounded_load": _core(PolicyName.BOUNDED_LOAD),
    "scorers": lambda conditions: Scorers(conditions.seed),
    "radix": lambda _: Radix(),
    "overlap_cost": lambda _: OverlapCost(),
    "work_times_batch": lambda _: WorkTimesBatch(),
    "omniscient": lambda _: Omniscient(),
    "expected_work": _core(PolicyName.EXPECTED_WORK),
}
"""By name, in the order of tables."""


def make(name: str, conditions: Conditions | None = None) -> Policy:
    """A policy by name. Raises KeyError for an unknown one."""
    return POLICIES[name](conditions or Conditions())
