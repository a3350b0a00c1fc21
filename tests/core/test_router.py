"""Router: membership, leases and what stays known through changes."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING

import pytest

from extproc.core.decision import Reason
from extproc.core.features import Api, Features
from extproc.core.replica import EngineLoad, Replica
from extproc.core.router import Router, RouterSettings
from tests.core.prompts import prompt, replica, replicas, router, without_affinity

if TYPE_CHECKING:
    from extproc.core.lease import Lease

TURN = prompt("a", 1000, session="a")


def lease_of(fleet: Router, tokens: int = 1000, now_s: float = 0.0) -> Lease:
    lease = fleet.decide(prompt("a", tokens, session="a"), now_s).lease
    assert lease is not None
    return lease


# Membership


def test_routers_with_the_same_members_agree_in_whatever_order_they_learned_of_them() -> None:
    orders = {tuple(router(*members).preference(TURN)) for members in permutations(replicas(4))}
    assert len(orders) == 1
    veteran = router(*replicas(9))
    for count in (2, 7, 1, 4):
        veteran.set_members(replicas(count), 1.0)
    assert tuple(veteran.preference(TURN)) in orders


def test_the_version_grows_with_every_change_and_with_nothing_else() -> None:
    fleet = Router()
    versions = []
    for members in ([], replicas(2), list(reversed(replicas(2))), replicas(3), [*replicas(2), replica(2, weight=2.0)]):
        fleet.set_members(members, 0.0)
        versions.append(fleet.membership_version)
    assert versions == [0, 1, 1, 2, 3]
    assert fleet.decide(TURN, 0.0).membership_version == 3


@pytest.mark.parametrize(
    ("name", "successor"),
    [
        ("the same id at the same address, after it was away", replica(1)),
        ("the same id at another address", Replica("replica-1", "10.0.0.9:8000")),
        ("another id at the same address", Replica("replica-9", replica(1).endpoint)),
    ],
)
def test_nothing_is_inherited(name: str, successor: Replica) -> None:
    fleet = router(replica(1))
    lease = lease_of(fleet)
    fleet.set_load("replica-1", EngineLoad(9, 0), 0.0)
    if "away" in name:
        fleet.set_members([], 1.0)
        assert fleet.decide(TURN, 1.0).reason is Reason.NO_REPLICA
    fleet.set_members([successor], 2.0)
    load = fleet.loads[successor.id]
    assert (load.in_flight, load.others_in_flight, load.ledger_tokens, load.computed_tokens) == (0, 0, 0.0, 0.0)
    assert fleet.weigh(TURN, 2.0).matched_bytes == 0
    fleet.first_token(lease, 3.0)
    fleet.finish(lease, 3.0)  # the old one's request ends now
    assert (load.in_flight, load.ledger_tokens, fleet.open_leases) == (0, 0.0, 0)


def test_who_stays_keeps_its_load_and_its_prompts() -> None:
    fleet = router(*replicas(2))
    decision = fleet.decide(TURN, 0.0)
    assert decision.lease is not None
    fleet.first_token(decision.lease, 0.0)
    fleet.set_members([*replicas(2), replica(2)], 0.0)
    fleet.set_members([replica(0, weight=2.0), replica(1, weight=2.0)], 0.0)
    assert fleet.in_flight(decision.replica_id or "") == 1
    again = fleet.weigh(TURN, 0.0)
    assert (again.replica_id, again.matched_bytes) == (decision.replica_id, 4000)


def test_a_draining_replica_gets_nothing_new_and_its_sessions_move_once() -> None:
    fleet = router(*replicas(4))
    before = {}
    for number in range(40):
        features = prompt(f"chat {number}", 1000, session=str(number))
        decision = fleet.decide(features, 0.0)
        before[number] = decision.replica_id
        assert decision.lease is not None
        fleet.finish(decision.lease, 0.0)
    fleet.set_members([replica(0, draining=True), *replicas(4)[1:]], 1.0)
    for round_ in range(3):
        went = {}
        for number in range(40):
            decision = fleet.decide(prompt(f"chat {number}", 1000, session=str(number)), 1.0)
            went[number] = decision.replica_id
            assert decision.lease is not None
            fleet.finish(decision.lease, 1.0)
        if round_ == 0:
            moved = went
        assert went == moved
    assert {number for number in before if before[number] != moved[number]} == {
        number for number in before if before[number] == "replica-0"
    }


def test_requests_under_way_at_a_draining_replica_still_count_there() -> None:
    fleet = router(replica(0))
    lease = lease_of(fleet)
    fleet.set_members([replica(0, draining=True), replica(1)], 0.0)
    assert fleet.in_flight("replica-0") == 1
    fleet.finish(lease, 1.0)
    assert fleet.in_flight("replica-0") == 0


def test_a_fleet_that_is_all_draining_is_better_than_none() -> None:
    fleet = router(replica(0, draining=True), replica(1, draining=True))
    assert fleet.decide(TURN, 0.0).replica_id in {"replica-0", "replica-1"}


# Models


@pytest.mark.parametrize(
    ("model", "reachable"),
    [
        ("a", {"replica-0", "replica-1", "replica-3"}),
        ("b", {"replica-1", "replica-2", "replica-3"}),
        ("an alias that nobody names", {"replica-0", "replica-1", "replica-2", "replica-3"}),
        (None, {"replica-0", "replica-1", "replica-2", "replica-3"}),
    ],
)
def test_a_request_goes_to_a_replica_that_serves_its_model(model: str | None, reachable: set[str]) -> None:
    fleet = router(replica(0, "a"), replica(1, "a", "b"), replica(2, "b"), replica(3))
    went = {fleet.decide(prompt(f"chat {number}", 1000, model=model), 0.0).replica_id for number in range(60)}
    assert went == reachable
    assert set(fleet.preference(prompt("chat", 1000, model=model))) == reachable


@pytest.mark.parametrize(
    ("models", "needed"),
    [((), False), (("a",), False), (("a", "b"), False), (("b",), True)],
    ids=["any", "one", "two on all", "one each"],
)
def test_a_model_matters_where_not_all_serve_it(models: tuple[str, ...], needed: bool) -> None:
    fleet = router(replica(0, *models and ("a", *models[1:])), replica(1, *models))
    assert fleet.needs_model("/v1/chat/completions") is needed
    assert Router().needs_model("/v1/chat/completions") is False


def test_load_by_one_model_is_seen_by_the_others() -> None:
    fleet = router(replica(0, "a", "b"), replica(1, "b"))
    fleet.decide(prompt("long", 50_000, model="a"), 0.0)
    assert fleet.decide(prompt("short", 1000, model="b"), 0.0).replica_id == "replica-1"


# Leases


def test_a_lease_counts_until_its_end_and_ends_once() -> None:
    fleet = router(replica(0))
    one, two = lease_of(fleet), lease_of(fleet)
    assert (fleet.in_flight("replica-0"), fleet.open_leases) == (2, 2)
    for _ in range(3):
        fleet.finish(one, 1.0)
        assert (fleet.in_flight("replica-0"), fleet.open_leases) == (1, 1)
    fleet.finish(two, 1.0)
    assert (fleet.in_flight("replica-0"), fleet.loads["replica-0"].ledger_tokens) == (0, 0.0)


def test_a_lease_that_nobody_ends_is_released_after_its_limit() -> None:
    fleet = router(replica(0), settings=RouterSettings(lease_limit_s=60.0))
    leaked = lease_of(fleet, now_s=0.0)
    younger = lease_of(fleet, now_s=1.0)
    fleet.tick(60.0)
    assert (leaked.open, younger.open) == (True, True)
    fleet.tick(60.5)
    assert (leaked.open, younger.open, fleet.in_flight("replica-0")) == (False, True, 1)
    fleet.first_token(leaked, 61.0)
    fleet.finish(leaked, 61.0)
    assert fleet.in_flight("replica-0") == 1


def test_a_ledger_drains_by_the_clock() -> None:
    fleet = router(replica(0), settings=RouterSettings(prefill_tokens_per_s=1000.0))
    lease_of(fleet, tokens=1000)
    for tenths, left in ((1, 900), (5, 500), (10, 0)):
        fleet.tick(tenths / 10)
        assert fleet.loads["replica-0"].ledger_tokens == pytest.approx(left)


# What answers teach


def test_the_engines_counts_correct_how_much_was_computed() -> None:
    fleet = router(replica(0))
    fleet.first_token(lease_of(fleet, tokens=1000), 0.1, prompt_tokens=1100, cached_tokens=300)
    assert fleet.loads["replica-0"].computed_tokens == 800
    assert fleet.loads["replica-0"].ledger_tokens == 0


@pytest.mark.parametrize(("bytes_per_token", "requests"), [(2, 20), (4, 20), (6, 20)])
def test_bytes_per_token_are_learned(bytes_per_token: int, requests: int) -> None:
    fleet = router(replica(0))
    for _ in range(requests):
        fleet.first_token(lease_of(fleet, tokens=3000), 0.0, prompt_tokens=12_000 // bytes_per_token)
    assert fleet.bytes_per_token == pytest.approx(bytes_per_token, rel=0.01)
    assert fleet.weigh(prompt("a", 3000), 0.0).prompt_tokens == pytest.approx(12_000 / bytes_per_token, rel=0.01)


@pytest.mark.parametrize(("prompt_tokens", "cached_tokens"), [(0, 0), (-5, -5), (10, 99), (None, 5), (5, None)])
def test_odd_counts_do_no_harm(prompt_tokens: int | None, cached_tokens: int | None) -> None:
    fleet = router(replica(0))
    lease = lease_of(fleet)
    fleet.first_token(lease, 0.1, prompt_tokens, cached_tokens)
    fleet.finish(lease, 0.2)
    load = fleet.loads["replica-0"]
    assert fleet.bytes_per_token > 0
    assert load.computed_tokens >= 0
    assert (load.ledger_tokens, load.in_flight) == (0.0, 0)


def test_a_length_that_no_cache_can_hold_is_not_believed() -> None:
    fleet = router(replica(0), settings=RouterSettings(kv_capacity_tokens=50_000))
    fleet.decide(replace(TURN, prompt_bytes=10**15), 0.0)
    assert fleet.loads["replica-0"].ledger_tokens == 50_000


# Looking without touching


def test_weighing_says_what_deciding_would_and_changes_nothing() -> None:
    fleet = router(*replicas(4))
    lease_of(fleet)
    before = (fleet.open_leases, len(fleet.memory), [load.ledger_tokens for load in fleet.loads.values()])
    for features in (TURN, prompt("b", 2000), without_affinity()):
        told = fleet.weigh(features, 0.0)
        assert told.lease is None
        assert (fleet.open_leases, len(fleet.memory), [load.ledger_tokens for load in fleet.loads.values()]) == before
        twin = router(*replicas(4))
        lease_of(twin)
        done = twin.decide(features, 0.0)
        assert (told.replica_id, told.reason, told.candidates) == (done.replica_id, done.reason, done.candidates)


def test_candidates_show_their_work_in_order_of_preference() -> None:
    fleet = router(*replicas(2), settings=RouterSettings(decode_tokens=64.0))
    home, other = fleet.preference(TURN)
    fleet.set_load(home, EngineLoad(2, 1), 0.0)
    shown = [(c.replica_id, c.uncached_tokens, c.work_tokens, c.in_flight) for c in fleet.weigh(TURN, 0.0).candidates]
    assert shown == [(home, 1000, 1192.0, 3), (other, 1000, 1000.0, 0)]  # 3 x 64 + 1000


def test_what_has_no_affinity_has_no_preference_and_leaves_no_trace() -> None:
    fleet = router(*replicas(2))
    fleet.decide(without_affinity(), 0.0)
    assert fleet.preference(without_affinity()) == []
    assert len(fleet.memory) == 0


def test_what_has_no_affinity_spreads_evenly() -> None:
    fleet = router(*replicas(8))
    for _ in range(80):
        fleet.decide(without_affinity(), 0.0)
    counts = [fleet.in_flight(replica_id) for replica_id in fleet.loads]
    assert max(counts) - min(counts) <= 3  # a tie is 128 tokens: two requests in flight


def test_decisions_say_when_their_ground_is_old() -> None:
    fleet = router(*replicas(2), settings=RouterSettings(load_stale_s=5.0))
    assert not fleet.weigh(TURN, 0.0).stale
    fleet.membership_stale = True
    assert fleet.weigh(TURN, 0.0).stale
    fleet.membership_stale = False
    fleet.set_load("replica-0", EngineLoad(1, 0), 0.0)
    fleet.tick(5.0)
    assert not fleet.weigh(TURN, 5.0).stale
    fleet.tick(5.2)
    assert fleet.weigh(TURN, 5.2).stale
    fleet.set_load("replica-0", EngineLoad(1, 0), 5.3)
    fleet.tick(5.3)
    assert not fleet.weigh(TURN, 5.3).stale


def test_load_of_an_unknown_replica_is_ignored() -> None:
    fleet = router(replica(0))
    fleet.set_load("replica-7", EngineLoad(5, 5), 0.0)
    assert fleet.in_flight("replica-7") == 0


# New settings under way


def test_new_settings_keep_leases_memory_and_traffic() -> None:
    fleet = router(*replicas(8))
    hot = prompt("a", 1000, system="hot", system_tokens=500)
    decision = fleet.decide(hot, 0.0)
    fleet.replace_settings(replace(fleet.settings, vnodes=100, decode_tokens=7.0, saturation_in_flight=2), 0.0)
    load = fleet.loads[decision.replica_id or ""]
    assert (load.in_flight, load.waiting_tokens) == (1, 1000 + 7.0)
    assert fleet.weigh(hot, 0.0).matched_bytes == 4000
    assert fleet.preference(hot) == router(*replicas(8), settings=RouterSettings(vnodes=100)).preference(hot)
    # The prefix had all of the traffic, so its home is still everyone.
    assert fleet._pool(hot).home(hot.system_rung.signature)[1] == 8  # type: ignore[union-attr]


def test_a_lower_line_holds_at_once() -> None:
    fleet = router(*replicas(2))
    home, other = fleet.preference(TURN)
    for _ in range(3):
        fleet.decide(TURN, 0.0, only=frozenset({fleet.loads[home].replica.endpoint}))
    fleet.replace_settings(replace(fleet.settings, saturation_in_flight=2), 0.0)
    assert fleet.decide(TURN, 0.0).replica_id == other


@pytest.mark.parametrize(
    "wrong",
    [
        {"saturation_in_flight": -1},
        {"vnodes": 0},
        {"prefill_tokens_per_s": float("nan")},
        {"lease_limit_s": 0.0},
        {"bounded_load_factor": 1.0},
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RouterSettings(**wrong)  # type: ignore[arg-type]


def test_applications_under_route_prefixes_get_their_own_paths_only() -> None:
    fleet = Router()
    fleet.set_members(
        [
            Replica("plain", "10.0.0.1:80", frozenset({"a"})),
            Replica("under-b", "10.0.0.2:80", frozenset({"b"}), route_prefix="/b"),
            Replica("under-b-c", "10.0.0.3:80", frozenset({"b"}), route_prefix="/b/c"),
        ],
        0.0,
    )
    chosen = {
        # The path comes before the model: a replica does not answer other paths than its own.
        ("/v1/chat/completions", "a"): "plain",
        ("/v1/chat/completions", "b"): "plain",
        ("/b/v1/chat/completions", "b"): "under-b",
        ("/b/v1/models", None): "under-b",
        ("/b/c/v1/models", None): "under-b-c",
        ("/bc/v1/models", None): "plain",
    }
    for (path, model), expected in chosen.items():
        features = Features(Api.OTHER, model, None, None, (), None, 0, False, path=path)
        assert fleet.decide(features, 0.0).replica_id == expected, path


def test_a_replica_that_was_unwell_starts_slowly_when_it_is_back() -> None:
    well, other = Replica("a", "10.0.0.1:80"), Replica("b", "10.0.0.2:80")
    fleet = Router(RouterSettings(slow_start_s=10.0))
    fleet.set_members([well, other], 0.0)
    fleet.set_members([replace(well, draining=True), other], 100.0)
    fleet.set_members([well, other], 200.0)
    # A tenth of its speed at first, half after half the time, all of it after 10 s.
    paces = []
    for now_s in (200.0, 205.0, 210.0):
        fleet.tick(now_s)
        paces.append(fleet.loads["a"].pace)
    assert paces == [pytest.approx(10.0), pytest.approx(2.0), 1.0]
    assert fleet.loads["b"].pace == 1.0
