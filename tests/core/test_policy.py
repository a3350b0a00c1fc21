"""Policies: scenarios with their arithmetic, and each policy's own promise whatever the traffic.

A request in flight costs 64 tokens, work that differs by at most 128 is a tie, the line is 16.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.decision import Decision, Reason
from extproc.core.replica import EngineLoad
from extproc.core.router import PolicyName, Router, RouterSettings
from tests.core.prompts import prompt, replica, replicas, router, without_affinity

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.core.features import Features
    from extproc.core.lease import Lease

LINE = 16
SETTINGS = RouterSettings(
    saturation_in_flight=LINE,
    decode_tokens=64.0,
    reuse_weight=0.0,
    tie_tokens=128.0,
    session_candidates=2,
    home_candidates=2,
    holder_candidates=4,
)


def fleet(count: int = 4, **changes: object) -> Router:
    return router(*replicas(count), settings=replace(SETTINGS, **changes))  # type: ignore[arg-type]


def home_of(fleet: Router, features: Features) -> str:
    return fleet.preference(features)[0]


def occupy(fleet: Router, requests: int, *replica_ids: str, now_s: float = 0.0) -> None:
    """Let engines report so many requests of other routers."""
    for replica_id in replica_ids:
        fleet.set_load(replica_id, EngineLoad(requests, 0), now_s)


def serve(fleet: Router, features: Features, now_s: float = 0.0) -> Decision:
    """Route a request and see it to its end at once."""
    decision = fleet.decide(features, now_s)
    assert decision.lease is not None
    fleet.first_token(decision.lease, now_s)
    fleet.finish(decision.lease, now_s)
    return decision


# Every reason, by a story that ends in it


def first_turn_of_a_session() -> Decision:
    return fleet().decide(prompt("a", 1000, session="a"), 0.0)


def second_turn_of_a_session() -> Decision:
    calm = fleet()
    serve(calm, prompt("a", 1000, session="a"))
    return calm.decide(prompt("a", 1200, session="a"), 1.0)


def first_prompt_of_nobody() -> Decision:
    return fleet().decide(prompt("a", 1000), 0.0)


def second_turn_without_a_session() -> Decision:
    calm = fleet()
    serve(calm, prompt("a", 1000))
    return calm.decide(prompt("a", 1200), 1.0)


def second_turn_after_its_home_has_left() -> Decision:
    shrunk = fleet()
    home = serve(shrunk, prompt("a", 1000)).replica_id
    shrunk.set_members([member for member in replicas(4) if member.id != home], 1.0)
    return shrunk.decide(prompt("a", 1200), 1.0)


def home_past_the_line() -> Decision:
    busy, turn = fleet(), prompt("a", 1200, session="a")
    serve(busy, prompt("a", 1000, session="a"))
    occupy(busy, LINE + 1, home_of(busy, turn))
    return busy.decide(turn, 0.0)


def home_with_a_long_prefill_before_a_short_prompt() -> Decision:
    # At home 100,000 tokens wait; elsewhere the whole prompt costs 1,200.
    busy = fleet()
    serve(busy, prompt("a", 1000, session="a"))
    busy.decide(prompt("long", 100_000, session="a"), 0.0)
    return busy.decide(prompt("a", 1200, session="a"), 0.0)


def nothing_to_be_near_to() -> Decision:
    return fleet().decide(without_affinity(), 0.0)


def all_past_the_line_and_shedding() -> Decision:
    full = fleet(shed=True, retry_after_s=2.5)
    occupy(full, LINE + 1, *full.loads)
    return full.decide(prompt("a", 1000), 0.0)


def nobody_there() -> Decision:
    return fleet(0).decide(prompt("a", 1000), 0.0)


STORIES: dict[Callable[[], Decision], Reason] = {
    first_turn_of_a_session: Reason.SESSION,
    second_turn_of_a_session: Reason.SESSION,
    first_prompt_of_nobody: Reason.COLD,
    second_turn_without_a_session: Reason.PREFIX,
    second_turn_after_its_home_has_left: Reason.COLD,
    home_past_the_line: Reason.SPILLOVER,
    home_with_a_long_prefill_before_a_short_prompt: Reason.SPREAD,
    nothing_to_be_near_to: Reason.NO_AFFINITY,
    all_past_the_line_and_shedding: Reason.SHED,
    nobody_there: Reason.NO_REPLICA,
}


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_reason(story: Callable[[], Decision]) -> None:
    assert story().reason is STORIES[story]


def test_every_reason_has_its_story() -> None:
    assert set(STORIES.values()) == set(Reason)


def test_a_refusal_names_no_replica_and_says_when_to_come_back() -> None:
    shed, nobody = all_past_the_line_and_shedding(), nobody_there()
    assert (shed.lease, shed.endpoint, shed.replica_id, shed.retry_after_s) == (None, None, None, 2.5)
    assert (nobody.lease, nobody.endpoint, nobody.replica_id, nobody.retry_after_s) == (None, None, None, None)


# Work decides


@pytest.mark.parametrize(
    ("prompt_tokens", "others_at_home", "stays"),
    [
        # At home all but 200 tokens are cached, so staying costs 200 + 64 for each request there, and leaving the
        # whole prompt. Differences up to 128 keep it home.
        (1200, 0, True),  # 200 : 1200
        (1200, 15, True),  # 1160 : 1200
        (1200, 17, False),  # past the line
        (4200, 16, True),  # 1224 : 4200
        (400, 3, True),  # 392 : 400
        (400, 5, True),  # 520 : 400, a tie
        (400, 6, False),  # 584 : 400
    ],
)
def test_a_conversation_leaves_home_when_waiting_costs_more_than_its_cache_saves(
    prompt_tokens: int, others_at_home: int, stays: bool
) -> None:
    busy, turn = fleet(), prompt("a", prompt_tokens, session="a")
    serve(busy, prompt("a", prompt_tokens - 200, session="a"))
    occupy(busy, others_at_home, home_of(busy, turn))
    assert (busy.decide(turn, 0.0).replica_id == home_of(busy, turn)) is stays


@pytest.mark.parametrize(("waiting_each", "stays"), [(0, False), (1, False), (2, True)])
def test_the_longer_the_queues_the_more_a_token_counts_that_need_not_be_computed(
    waiting_each: int, stays: bool
) -> None:
    """The home has 2,000 tokens more to do, 1,000 are in its cache; they count 1,000 x (1 + queue)."""
    busy, turn = fleet(reuse_weight=1.0, decode_tokens=0.0, tie_tokens=0.0), prompt("a", 1000, session="a")
    serve(busy, turn)
    home = home_of(busy, turn)
    for load in busy.loads.values():
        for number in range(waiting_each):
            # The same wait everywhere, but at home.
            tokens = 3000 + 2000 * (number == 0 and load.replica.id == home)
            busy.decide(without_affinity(tokens), 0.0, frozenset({load.replica.endpoint}))
    if not waiting_each:
        busy.decide(without_affinity(2000), 0.0, frozenset({busy.loads[home].replica.endpoint}))
    for _ in range(300):
        busy.tick(0.0)  # no time passes, so nothing drains
    assert (busy.weigh(turn, 0.0).replica_id == home) is stays


@pytest.mark.parametrize(("ours", "at_home"), [(0, True), (4, True), (8, False)])
def test_a_conversation_new_to_one_of_several_routers_is_presumed_to_be_at_home(ours: int, at_home: bool) -> None:
    """The fewer requests come by others, the less likely one of them has sent it there.

    Home has 12 more in flight than the rest, worth 768 tokens, 640 beyond a tie. Others have just those 12, so
    their share of all is 12 / (12 + ours), 1, 0.75 or 0.6, and the presumed part of the prompt as much of 1,000.
    """
    shared, turn = fleet(), prompt("a", 1000, session="a")
    home = home_of(shared, turn)
    for replica_id in shared.loads:
        load = shared.loads[replica_id]
        for _ in range(ours // 4):
            lease = shared.decide(without_affinity(), 0.0, frozenset({load.replica.endpoint})).lease
            assert lease is not None
            shared.first_token(lease, 0.0)
    for tenth in range(300):  # half a minute
        occupy(shared, ours // 4 + 12, home, now_s=tenth / 10)
        occupy(shared, ours // 4, *(shared.loads.keys() - {home}), now_s=tenth / 10)
        shared.tick(tenth / 10)
    assert (shared.weigh(turn, 30.0).replica_id == home) is at_home


def test_a_conversation_goes_home_when_it_is_calm_there() -> None:
    busy, home = fleet(), home_of(fleet(), prompt("a", 0, session="a"))
    serve(busy, prompt("a", 4000, session="a"))
    occupy(busy, LINE + 1, home)
    away = serve(busy, prompt("a", 4100, session="a"))
    assert (away.reason, away.primary) == (Reason.SPILLOVER, home)
    assert away.replica_id != home
    occupy(busy, 0, home)
    # 4,000 of its tokens are cached at home, 4,100 away: less than a tie apart.
    back = busy.decide(prompt("a", 4110, session="a"), 0.0)
    assert (back.reason, back.replica_id) == (Reason.SESSION, home)


def test_on_an_idle_fleet_everyone_goes_where_the_ring_says() -> None:
    idle = fleet(16)
    for number in range(200):
        decision = serve(idle, prompt(f"chat {number}", 1000))
        assert decision.replica_id == decision.primary == idle.preference(prompt(f"chat {number}", 1000))[0]


def test_cached_tokens_are_counted_to_the_conversations_last_length_not_to_a_rung() -> None:
    calm = fleet()
    serve(calm, prompt("a", 1000, session="a"))  # 4,000 bytes: the deepest rung is at 2,048
    assert calm.decide(prompt("a", 1200, session="a"), 0.0).matched_bytes == 4000


@pytest.mark.parametrize(
    ("edited", "matched_bytes"),
    [
        (prompt("another", 1000, system="s", system_tokens=300, session="a"), 1200),  # same system prompt
        (prompt("another", 1000, session="a"), 0),  # nothing alike
        (prompt("a", 900, system="s", system_tokens=300, session="a"), 3600),  # the last turn taken back: all of it
    ],
)
def test_another_prompt_under_a_known_session_is_cached_no_further_than_it_is_alike(
    edited: Features, matched_bytes: int
) -> None:
    calm = fleet()
    serve(calm, prompt("a", 1000, system="s", system_tokens=300, session="a"))
    assert calm.decide(edited, 0.0).matched_bytes == matched_bytes


def test_a_cache_forgets_what_was_not_touched_for_as_long_as_its_size() -> None:
    small = fleet(1, kv_capacity_tokens=10_000)
    serve(small, prompt("a", 1000))
    serve(small, prompt("b", 9_990))
    assert small.weigh(prompt("a", 1000), 0.0).matched_bytes == 4000
    serve(small, prompt("c", 20))  # 10,010 tokens since
    assert small.weigh(prompt("a", 1000), 0.0).matched_bytes == 0


def test_a_faster_replica_gets_work_in_proportion() -> None:
    uneven = router(
        replica(0),
        replica(1),
        replica(2, weight=2.0),
        settings=replace(SETTINGS, saturation_in_flight=10**6, session_candidates=3),
    )
    for number in range(400):
        uneven.decide(prompt(f"chat {number}", 1000), 0.0)  # 400,000 tokens, none ever done
    ledgers = [uneven.loads[f"replica-{number}"].ledger_tokens for number in range(3)]
    assert ledgers == pytest.approx([100_000, 100_000, 200_000], rel=0.03)


def test_a_newcomer_is_taken_for_slow_at_first_but_not_left_out() -> None:
    grown = fleet(1, slow_start_s=10.0)
    grown.set_members(replicas(2), 100.0)
    cold = next(f for n in range(99) if home_of(grown, f := prompt(f"chat {n}", 1000, session=f"{n}")) == "replica-1")
    assert grown.weigh(cold, 100.0).replica_id == "replica-0"  # 1000 : 1000 x 10
    occupy(grown, LINE, "replica-0", now_s=100.0)
    grown.decide(prompt("long", 9_000), 100.0, only=frozenset({replica(0).endpoint}))
    assert grown.weigh(cold, 100.0).replica_id == "replica-1"  # 1024 + 9000 + 1000 : 1000 x 10
    grown = fleet(1, slow_start_s=10.0)
    grown.set_members(replicas(2), 100.0)
    grown.tick(110.0)
    assert grown.weigh(cold, 110.0).replica_id == "replica-1"


# The line


@pytest.mark.parametrize("policy", [PolicyName.EXPECTED_WORK, PolicyName.RING_SPILLOVER])
@pytest.mark.parametrize(("in_flight", "spills"), [(15, False), (16, False), (17, True)])
def test_the_home_takes_requests_until_it_is_past_the_line(policy: PolicyName, in_flight: int, spills: bool) -> None:
    busy, turn = fleet(policy=policy), prompt("a", 8200, session="a")
    serve(busy, prompt("a", 8000, session="a"))
    occupy(busy, in_flight, home_of(busy, turn))
    decision = busy.decide(turn, 0.0)
    assert (decision.replica_id != home_of(busy, turn), decision.reason is Reason.SPILLOVER) == (spills, spills)


def test_home_is_where_the_conversation_is_held_even_if_the_ring_names_another() -> None:
    busy, turn = fleet(), prompt("a", 50_000, session="a")
    occupy(busy, LINE + 1, home_of(busy, turn))
    away = serve(busy, turn).replica_id or ""
    occupy(busy, 0, home_of(busy, turn))
    assert busy.weigh(turn, 0.0).replica_id == away  # 50,000 tokens are cached there
    occupy(busy, LINE + 1, away)
    back = busy.decide(turn, 0.0)
    assert (back.replica_id, back.reason) == (home_of(busy, turn), Reason.SPILLOVER)


def test_past_the_line_is_avoided_even_where_it_would_be_faster() -> None:
    busy, turn = fleet(2), prompt("a", 50_000, session="a")
    serve(busy, turn)
    home, other = busy.preference(turn)
    occupy(busy, LINE + 1, home)
    occupy(busy, LINE, other)
    assert busy.decide(turn, 0.0).replica_id == other  # 50,000 + 1,024 tokens instead of 1,088


@pytest.mark.parametrize("policy", PolicyName)
def test_with_all_past_the_line_someone_still_takes_it_unless_told_to_shed(policy: PolicyName) -> None:
    full = fleet(policy=policy)
    occupy(full, LINE + 10, *full.loads)
    occupy(full, LINE + 1, "replica-2")
    assert full.decide(prompt("a", 1000), 0.0).replica_id is not None
    if policy is not PolicyName.BOUNDED_LOAD:
        assert full.weigh(prompt("a", 1000), 0.0).replica_id == "replica-2"
    full.replace_settings(replace(full.settings, shed=True), 0.0)
    assert full.decide(prompt("a", 1000), 0.0).reason is Reason.SHED
    occupy(full, LINE - 5, "replica-1")
    assert full.decide(prompt("a", 1000), 0.0).replica_id is not None


def test_a_spill_goes_to_the_next_in_ring_order_so_that_all_routers_spill_alike() -> None:
    for number in range(30):
        busy, turn = fleet(8), prompt("a", 1000, session=str(number))
        home, second, *_ = busy.preference(turn)
        occupy(busy, LINE + 1, home)
        assert busy.decide(turn, 0.0).replica_id == second


# The least of all is always among the candidates

happenings = st.lists(
    st.tuples(st.sampled_from(["decide", "answer", "finish", "report", "tick"]), st.integers(0, 9), st.floats(0, 0.2)),
    max_size=60,
)


@given(happenings)
def test_the_least_loaded_is_found_whatever_happened(history: list[tuple[str, int, float]]) -> None:
    fleet_, now_s = fleet(5, session_candidates=0, home_candidates=0, holder_candidates=0, load_stale_s=0.3), 0.0
    leases: list[Lease] = []
    for happening, number, later_s in history:
        now_s += later_s
        match happening:
            case "decide":
                loads = fleet_.loads.values()
                best = min(loads, key=lambda load: (load.total_in_flight > LINE, load.work_tokens()))
                decision = fleet_.decide(prompt(f"chat {number}", 500 * number), now_s)
                assert decision.replica_id == best.replica.id
                assert decision.lease is not None
                leases.append(decision.lease)
            case "answer" if leases:
                fleet_.first_token(leases[number % len(leases)], now_s)
            case "finish" if leases:
                fleet_.finish(leases.pop(number % len(leases)), now_s)
            case "report":
                occupy(fleet_, 3 * number, f"replica-{number % 5}", now_s=now_s)
            case _:
                fleet_.tick(now_s)


# A subset of endpoints


@pytest.mark.parametrize("policy", PolicyName)
def test_only_the_allowed_are_chosen(policy: PolicyName) -> None:
    some = fleet(8, policy=policy)
    allowed = frozenset({replica(3).endpoint, replica(5).endpoint})
    for number in range(60):
        assert some.decide(prompt(f"chat {number}", 1000), 0.0, only=allowed).endpoint in allowed
    assert some.in_flight("replica-3") > 0
    assert some.in_flight("replica-5") > 0
    assert some.decide(prompt("a", 1000), 0.0, only=frozenset({"10.9.9.9:1"})).reason is Reason.NO_REPLICA


# A prefix that all traffic shares: 2,000 tokens, and 100 of their own


def spread_of_hot_prefix(at_once: int) -> Counter[str]:
    """Where 400 such requests go, `at_once` of them in flight at any time."""
    hot, now_s = fleet(16), 0.0
    in_flight: deque[Decision] = deque()
    went: Counter[str] = Counter()
    for number in range(400):
        now_s += 0.001
        if len(in_flight) == at_once:
            lease = in_flight.popleft().lease
            assert lease is not None
            hot.finish(lease, now_s)
        decision = hot.decide(prompt(f"chat {number}", 2100, system="hot", system_tokens=2000), now_s)
        in_flight.append(decision)
        went[decision.replica_id or ""] += 1
    return went


@pytest.mark.parametrize(
    ("at_once", "fewest", "most"),
    [
        (1, 1, 2),
        (2, 2, 4),  # a second copy is worth making while a first is being computed
        (32, 16, 16),
        (128, 16, 16),
    ],
)
def test_a_hot_prefix_stays_on_few_at_low_load_and_spreads_as_load_rises(at_once: int, fewest: int, most: int) -> None:
    assert fewest <= len(spread_of_hot_prefix(at_once)) <= most


def test_conversations_under_a_hot_prefix_do_not_herd_on_one_replica() -> None:
    for at_once in (32, 128):
        went = spread_of_hot_prefix(at_once)
        assert max(went.values()) <= 1.5 * 400 / 16


def test_conversations_under_one_prefix_begin_at_different_members_of_its_home() -> None:
    # The prefix is shorter than a tie, so where it is cached does not matter.
    calm = fleet(8, session_candidates=0, holder_candidates=0, home_candidates=1)
    chats = [prompt(f"chat {number}", 500, system="hot", system_tokens=100) for number in range(220)]
    for chat in chats[:60]:
        serve(calm, chat)
    went = Counter(serve(calm, chat).replica_id for chat in chats[60:])
    assert len(went) == 8  # all traffic has this prefix, so all of the fleet is its home
    assert max(went.values()) <= 2 * 160 / 8


def test_a_burst_sees_every_earlier_request_of_itself() -> None:
    burst = fleet(16)
    for number in range(160):
        burst.decide(prompt(f"chat {number}", 2100, system="hot", system_tokens=2000), 0.0)
    assert max(burst.in_flight(replica_id) for replica_id in burst.loads) <= LINE


# The simpler rules

turns = st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=150)
"""(conversation, whether the oldest request ends first)"""


def play(fleet: Router, traffic: list[tuple[int, bool]]) -> list[tuple[dict[str, int], Features, Decision]]:
    """Each decision, with what was in flight before it."""
    open_leases: deque[Decision] = deque()
    told = []
    for conversation, ends in traffic:
        if ends and open_leases:
            lease = open_leases.popleft().lease
            assert lease is not None
            fleet.finish(lease, 0.0)
        before = {replica_id: fleet.in_flight(replica_id) for replica_id in fleet.loads}
        features = prompt(f"chat {conversation}", 1000)
        decision = fleet.decide(features, 0.0)
        open_leases.append(decision)
        told.append((before, features, decision))
    return told


@given(turns)
def test_ring_spillover_is_the_primary_unless_past_the_line_else_the_least_loaded(
    traffic: list[tuple[int, bool]],
) -> None:
    literal = fleet(5, policy=PolicyName.RING_SPILLOVER, spillover_in_flight=3)
    for before, features, decision in play(literal, traffic):
        primary = home_of(literal, features)
        assert decision.primary == primary
        if before[primary] <= 3:
            assert decision.replica_id == primary
        else:
            assert before[decision.replica_id or ""] == min(before.values())


@given(turns)
def test_bounded_load_is_the_first_in_ring_order_that_has_room(traffic: list[tuple[int, bool]]) -> None:
    bounded = fleet(5, policy=PolicyName.BOUNDED_LOAD, bounded_load_factor=1.25)
    for before, features, decision in play(bounded, traffic):
        bound = math.ceil(1.25 * (sum(before.values()) + 1) / 5)
        chosen = decision.replica_id or ""
        assert before[chosen] + 1 <= bound
        for earlier in bounded.preference(features):
            if earlier == chosen:
                break
            assert before[earlier] + 1 > bound


def test_bounded_load_gives_a_heavier_replica_a_higher_bound() -> None:
    uneven = router(
        replica(0),
        replica(1, weight=3.0),
        settings=replace(SETTINGS, policy=PolicyName.BOUNDED_LOAD, bounded_load_factor=1.25),
    )
    light = next(f for n in range(99) if home_of(uneven, f := prompt(f"chat {n}", 1000)) == "replica-0")
    heavy = next(f for n in range(99) if home_of(uneven, f := prompt(f"chat {n}", 1000)) == "replica-1")
    for features, name, bound in ((light, "replica-0", 13), (heavy, "replica-1", 38)):
        one_sided = router(*(load.replica for load in uneven.loads.values()), settings=uneven.settings)
        for _ in range(40):
            one_sided.decide(features, 0.0)
        assert one_sided.in_flight(name) == bound  # ceil(1.25 x 40 x weight / 4)
