"""The router as a state machine: whatever happens in whatever order, its promises hold.

Every step is played to two routers, which must decide alike: a decision depends on what happened before and on the
request, and on nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from extproc.core.decision import Reason
from extproc.core.replica import EngineLoad, Replica
from extproc.core.router import PolicyName, Router, RouterSettings
from tests.core.prompts import prompt, without_affinity

if TYPE_CHECKING:
    from extproc.core.features import Features
    from extproc.core.lease import Lease

LINE = 3
SETTINGS = RouterSettings(
    saturation_in_flight=LINE,
    spillover_in_flight=LINE,
    kv_capacity_tokens=20_000,
    placement_entries=40,
    lease_limit_s=60.0,
    vnodes=16,
)
NAMES = [f"replica-{number}" for number in range(6)]
MODELS: list[frozenset[str]] = [frozenset(), frozenset({"a"}), frozenset({"a", "b"})]

names = st.sampled_from(NAMES)
requests = st.one_of(
    st.builds(
        prompt,
        st.sampled_from(["x", "y", "z"]),
        st.sampled_from([1, 400, 1000, 5000, 30_000]),
        system=st.sampled_from(["", "s"]),
        system_tokens=st.just(300),
        session=st.sampled_from([None, "1", "2"]),
        model=st.sampled_from([None, "a", "b", "c"]),
        streamed=st.booleans(),
    ),
    st.builds(without_affinity, st.sampled_from([0, 1000])),
)
reports = st.builds(
    EngineLoad,
    running=st.sampled_from([0, 1, LINE, LINE + 1, 10**6, -1]),
    waiting=st.sampled_from([0, 1, 10**6, -5]),
    capacity_tokens=st.sampled_from([None, 0, -1, 1, 5000, 10**9]),
)
counts = st.sampled_from([None, -1, 0, 1, 900, 10**9])


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.members: dict[str, Replica] = {}
        self.router, self.twin = Router(SETTINGS), Router(SETTINGS)
        self.leases: list[tuple[Lease, Lease]] = []

    # -------------------------------------------------------------------------------------------------- what happens

    @rule(name=names, port=st.sampled_from([8000, 8001]), models=st.sampled_from(MODELS))
    def join_or_move(self, name: str, port: int, models: frozenset[str]) -> None:
        self.members[name] = Replica(name, f"{name}:{port}", models)
        self._set_members()

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.members.pop(name, None)
        self._set_members()

    @rule(name=names, weight=st.sampled_from([0.01, 0.5, 3.0]))
    def weigh(self, name: str, weight: float) -> None:
        self._change(name, weight=weight)

    @rule(name=names, draining=st.booleans())
    def drain(self, name: str, draining: bool) -> None:
        self._change(name, draining=draining)

    @rule(name=names, report=reports)
    def report(self, name: str, report: EngineLoad) -> None:
        self.router.set_load(name, report, self.now_s)
        self.twin.set_load(name, report, self.now_s)

    @rule(later_s=st.sampled_from([0.0, 0.05, 1.0, 7.0, 100.0]), ticks=st.booleans())
    def time_passes(self, later_s: float, ticks: bool) -> None:
        self.now_s += later_s
        if ticks:
            self.router.tick(self.now_s)
            self.twin.tick(self.now_s)

    @rule(policy=st.sampled_from(PolicyName), shed=st.booleans(), slow_start_s=st.sampled_from([0.0, 10.0]))
    def change_settings(self, policy: PolicyName, shed: bool, slow_start_s: float) -> None:
        changed = replace(self.router.settings, policy=policy, shed=shed, slow_start_s=slow_start_s)
        self.router.replace_settings(changed, self.now_s)
        self.twin.replace_settings(changed, self.now_s)

    @rule(features=requests, only=st.none() | st.sets(names, max_size=3))
    def decide(self, features: Features, only: set[str] | None) -> None:
        endpoints = None
        if only is not None:
            endpoints = frozenset(member.endpoint for name, member in self.members.items() if name in only)
        eligible = self._eligible(features, endpoints)
        in_flight = {name: load.total_in_flight for name, load in self.router.loads.items()}
        foreseen = self.twin.weigh(features, self.now_s) if endpoints is None else None

        decision = self.router.decide(features, self.now_s, endpoints)
        again = self.twin.decide(features, self.now_s, endpoints)

        assert self._told(decision) == self._told(again)
        if foreseen is not None:
            assert self._told(foreseen) == self._told(again)
        assert decision.membership_version == self.router.membership_version
        if decision.lease is None:
            assert decision.replica_id is None
            if decision.reason is Reason.NO_REPLICA:
                assert not eligible
            else:
                assert decision.reason is Reason.SHED
                assert self.router.settings.shed
                assert all(in_flight[name] > LINE for name in eligible)
            return
        assert again.lease is not None
        self.leases.append((decision.lease, again.lease))
        assert decision.replica_id in eligible
        assert decision.endpoint == self.members[decision.replica_id].endpoint
        if self.router.settings.policy is not PolicyName.BOUNDED_LOAD:
            # The saturation line holds while anyone is under it.
            assert in_flight[decision.replica_id] <= LINE or all(in_flight[name] > LINE for name in eligible)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), prompt_tokens=counts, cached_tokens=counts)
    def first_token(self, data: st.DataObject, prompt_tokens: int | None, cached_tokens: int | None) -> None:
        one, other = data.draw(st.sampled_from(self.leases))
        self.router.first_token(one, self.now_s, prompt_tokens, cached_tokens)
        self.twin.first_token(other, self.now_s, prompt_tokens, cached_tokens)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Leases stay in the list, so some are finished twice."""
        one, other = data.draw(st.sampled_from(self.leases))
        self.router.finish(one, self.now_s)
        self.twin.finish(other, self.now_s)
        assert not one.open

    # ------------------------------------------------------------------------------------------------- what must hold

    @invariant()
    def in_flight_is_the_open_leases(self) -> None:
        open_leases = [lease for lease, _ in self.leases if lease.open]
        assert self.router.open_leases == len(open_leases)
        held = Counter(id(lease.load) for lease in open_leases)
        for name in NAMES:
            load = self.router.loads.get(name)
            assert self.router.in_flight(name) == (held[id(load)] if load else 0)

    @invariant()
    def loads_are_sane(self) -> None:
        assert self.router.loads.keys() == self.members.keys()
        open_tokens: Counter[int] = Counter()
        for lease, _ in self.leases:
            if lease.open:
                open_tokens[id(lease.load)] += math.ceil(lease.uncached_tokens) + 1
        for load in self.router.loads.values():
            assert 0.0 <= load.ledger_tokens <= open_tokens[id(load)]
            assert load.others_in_flight >= 0
            assert load.capacity_tokens > 0
            assert load.prefill_tokens_per_s > 0
            assert math.isfinite(load.work_tokens(1000.0))
            assert load.pace > 0

    @invariant()
    def bounds_hold(self) -> None:
        memory = self.router.memory
        assert len(memory) <= self.router.settings.placement_entries
        assert memory.size_bytes <= self.router.settings.placement_bytes
        assert self.router.bytes_per_token > 0

    # -------------------------------------------------------------------------------------------------------- helpers

    def _change(self, name: str, **changes: object) -> None:
        if name in self.members:
            self.members[name] = replace(self.members[name], **changes)  # type: ignore[arg-type]
            self._set_members()

    def _set_members(self) -> None:
        self.router.set_members(self.members.values(), self.now_s)
        self.twin.set_members(self.members.values(), self.now_s)

    def _eligible(self, features: Features, endpoints: frozenset[str] | None) -> set[str]:
        """Who may get the request, by the rules as an operator would say them."""

        def serves(member: Replica) -> bool:
            return not member.models or features.model in member.models

        known = any(features.model in member.models for member in self.members.values())
        able = [member for member in self.members.values() if serves(member) or not known]
        ready = [member for member in able if not member.draining] or able
        return {member.id for member in ready if endpoints is None or member.endpoint in endpoints}

    @staticmethod
    def _told(decision: object) -> tuple[object, ...]:
        shown = ("reason", "replica_id", "endpoint", "primary", "matched_bytes", "prompt_tokens", "candidates", "stale")
        return tuple(getattr(decision, name) for name in shown)


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=60, stateful_step_count=60)
