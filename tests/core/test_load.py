"""Load: the ledger's arithmetic, second by second.

The replica prefills 1,000 tokens/s and a request in flight costs 10 tokens, so every figure can be checked by hand.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from extproc.core.lease import Lease
from extproc.core.load import MIN_SAMPLE_TOKENS, SLOWEST_START, SPEED_STEP, ReplicaLoad
from extproc.core.replica import EngineLoad, Replica
from extproc.core.router import RouterSettings
from tests.core.prompts import replica

SETTINGS = RouterSettings(prefill_tokens_per_s=1000.0, decode_tokens=10.0, slow_start_s=10.0, load_stale_s=5.0)


def load_of(weight: float = 1.0, *, warm: bool = True, now_s: float = 0.0) -> ReplicaLoad:
    return ReplicaLoad(replica(0, weight=weight), 1, SETTINGS, now_s, warm)


def take(load: ReplicaLoad, tokens: float, now_s: float, *, streamed: bool = True) -> Lease:
    lease = Lease(load, now_s, int(tokens) * 4, tokens, tokens, streamed)
    load.take(lease, now_s)
    return lease


def ledger(load: ReplicaLoad, now_s: float) -> float:
    load.pass_time(now_s)
    return load.ledger_tokens


# Guessing: no first token is ever signalled


def test_the_ledger_drains_at_the_replicas_speed_first_come_first_served() -> None:
    load = load_of()
    first = take(load, 1000, 0.0)
    take(load, 500, 0.0)
    assert ledger(load, 0.0) == 1500
    assert ledger(load, 0.4) == 1100  # 600 + 500
    assert ledger(load, 1.2) == approx(300)  # 0 + 300
    load.release(first, 1.2)
    assert ledger(load, 1.2) == approx(300)  # the first one's part was worked off already
    assert ledger(load, 9.0) == 0
    assert load.in_flight == 1


def test_idle_time_is_not_saved_up() -> None:
    load = load_of()
    take(load, 1000, 60.0)
    assert ledger(load, 60.5) == 500


def test_a_request_that_ends_early_gives_back_what_it_had_left() -> None:
    load = load_of()
    first, second = take(load, 1000, 0.0), take(load, 500, 0.0)
    load.release(first, 0.25)
    assert ledger(load, 0.25) == 500
    load.release(second, 0.35)
    assert (load.ledger_tokens, load.in_flight) == (0.0, 0)


# Guessing better: the engine says how many wait


def waiting(load: ReplicaLoad, requests: int, now_s: float, *, running: int = 0) -> None:
    load.report(EngineLoad(running, requests), now_s)


def test_those_that_wait_are_the_last_that_came_and_nothing_of_them_is_done() -> None:
    load = load_of()
    for tokens in (1000, 500, 200):
        take(load, tokens, 0.0)
    assert ledger(load, 1.6) == approx(100)  # thought: 0 + 0 + 100
    waiting(load, 2, 1.6, running=1)
    assert load.ledger_tokens == 700  # 500 + 200
    waiting(load, 0, 1.6, running=3)
    assert load.ledger_tokens == 700  # which of them is at work, and how far, it doesn't say


@pytest.mark.parametrize(
    ("left", "waits", "factor"),
    [(3, 2, 1.0), (3, 3, 1 / (1 + SPEED_STEP)), (3, 1, 1 + SPEED_STEP), (0, 1, 1 / (1 + SPEED_STEP)), (1, 0, 1.0)],
)
def test_a_queue_that_is_longer_than_thought_means_a_slower_replica(left: int, waits: int, factor: float) -> None:
    load = load_of()
    for _ in range(3 - left):
        take(load, 1, 0.0)
    for _ in range(left):
        take(load, 10_000, 0.0)
    load.pass_time(1.0)
    waiting(load, waits, 1.0, running=3 - waits)
    assert load.prefill_tokens_per_s == approx(1000 * factor)


def test_of_a_queue_that_others_share_a_part_is_ours() -> None:
    load = load_of()
    take(load, 100, 0.0)
    take(load, 100, 0.0)
    load.pass_time(5.0)
    waiting(load, 2, 5.0, running=2)  # two of four requests are ours, so one of the two that wait
    assert load.ledger_tokens == 100


def test_where_first_tokens_are_signalled_the_queue_says_nothing_new() -> None:
    load = load_of()
    load.first_token(take(load, 100, 0.0), 0.1)
    waiting(load, 1, 5.0)
    assert (load.ledger_tokens, load.prefill_tokens_per_s) == (0.0, 1000.0)


def test_a_queue_of_less_than_nobody_harms_nothing() -> None:
    load = load_of()
    take(load, 100, 0.0)
    waiting(load, -7, 0.0)
    assert load.ledger_tokens == 100


# Knowing: answers begin with their first token


def test_a_first_token_settles_its_request_at_once() -> None:
    load = load_of()
    first, _ = take(load, 1000, 0.0), take(load, 500, 0.0)
    load.first_token(first, 0.1)  # five times as fast as was thought
    assert load.ledger_tokens == 500
    assert load.in_flight == 2


def test_a_prefill_that_takes_longer_than_thought_holds_up_those_behind_it() -> None:
    load = load_of()
    load.first_token(take(load, 10, 0.0), 0.0)  # from now on it is known that answers tell
    first = take(load, 1000, 1.0)
    take(load, 500, 1.0)
    assert ledger(load, 1.4) == approx(1100)
    assert ledger(load, 3.0) == approx(500)  # 0 + 500: the second one has not begun
    load.first_token(first, 3.0)
    assert ledger(load, 3.2) == approx(500 - 0.2 * load.prefill_tokens_per_s)


def test_an_answer_that_is_not_streamed_is_guessed_until_a_later_one_begins() -> None:
    load = load_of()
    load.first_token(take(load, 10, 0.0), 0.0)
    take(load, 1000, 1.0, streamed=False)
    later = take(load, 500, 1.0)
    assert ledger(load, 1.6) == approx(900)  # 400 + 500
    load.first_token(later, 1.7)  # prefill is in order, so the earlier one is over as well
    assert load.ledger_tokens == 0


def test_the_end_of_an_answer_that_is_not_streamed_says_nothing_of_speed() -> None:
    load = load_of()
    lease = take(load, 1000, 0.0, streamed=False)
    load.first_token(lease, 30.0)
    assert load.ledger_tokens == 0
    assert not load.signals_first_token
    assert load.prefill_tokens_per_s == 1000


@pytest.mark.parametrize("speed", [200.0, 1000.0, 20_000.0])
def test_the_speed_is_learned_from_first_tokens(speed: float) -> None:
    load, now_s = load_of(), 0.0
    for _ in range(100):
        lease = take(load, 2000, now_s)
        now_s += 2000 / speed
        load.first_token(lease, now_s)
        load.release(lease, now_s)
    assert load.prefill_tokens_per_s == approx(speed, rel=0.05)


def test_waiting_behind_another_prefill_is_not_slowness() -> None:
    load, now_s = load_of(), 0.0
    for _ in range(50):  # pairs that arrive together: the second waits 2 s, and is computed in 2 s
        first, second = take(load, 2000, now_s), take(load, 2000, now_s)
        load.first_token(first, now_s + 2)
        load.first_token(second, now_s + 4)
        now_s += 10
    assert load.prefill_tokens_per_s == approx(1000, rel=0.01)


def test_a_short_prefill_says_more_of_overheads_than_of_speed() -> None:
    load = load_of()
    load.first_token(take(load, MIN_SAMPLE_TOKENS - 1, 0.0), 60.0)
    assert load.prefill_tokens_per_s == 1000


# Work


@pytest.mark.parametrize(
    ("weight", "in_flight", "ledger_tokens", "uncached", "work"),
    [
        (1.0, 0, 0, 0, 0),
        (1.0, 0, 0, 500, 500),
        (1.0, 1, 1000, 500, 1510),  # 1000 + 1 x 10 + 500
        (1.0, 3, 3000, 0, 3030),  # 3000 + 3 x 10
        (2.0, 3, 3000, 0, 1515),  # the same at twice the pace
        (0.5, 1, 1000, 500, 3020),
    ],
)
def test_work(weight: float, in_flight: int, ledger_tokens: int, uncached: int, work: float) -> None:
    load = load_of(weight)
    for _ in range(in_flight):
        take(load, ledger_tokens / in_flight, 0.0)
    assert load.work_tokens(uncached) == approx(work)


@pytest.mark.parametrize(
    ("age_s", "pace"),
    [(0.0, 1 / SLOWEST_START), (0.5, 1 / SLOWEST_START), (2.5, 4.0), (5.0, 2.0), (10.0, 1.0), (1000.0, 1.0)],
)
def test_a_replica_that_joins_a_running_fleet_starts_slowly(age_s: float, pace: float) -> None:
    load = load_of(warm=False, now_s=100.0)
    load.refresh(100.0 + age_s)
    assert load.pace == approx(pace)


def test_it_rests_only_when_the_clock_has_nothing_more_to_say() -> None:
    load = load_of(warm=False, now_s=100.0)
    load.refresh(109.95)
    assert not load.is_at_rest(200.0)  # its pace is not yet 1, however late it is
    load.refresh(110.0)
    assert load.is_at_rest(200.0)
    lease = take(load, 1000, 200.0)
    assert not load.is_at_rest(200.0)
    load.release(lease, 200.1)
    load.report(EngineLoad(running=3, waiting=0), 200.0)
    assert load.is_at_rest(205.0)
    assert not load.is_at_rest(205.1)


def test_a_shorter_slow_start_holds_at_once() -> None:
    load = load_of(warm=False, now_s=100.0)
    load.adopt(replace(SETTINGS, slow_start_s=0.0))
    load.refresh(100.0)
    assert load.pace == 1.0


# What engines report


@pytest.mark.parametrize(
    ("own", "running", "waiting", "others"),
    [(0, 0, 0, 0), (0, 3, 2, 5), (2, 2, 0, 0), (2, 3, 4, 5), (5, 1, 0, 0), (0, -7, 2, 0)],
)
def test_what_an_engine_has_beyond_our_leases_came_by_other_routers(
    own: int, running: int, waiting: int, others: int
) -> None:
    load = load_of()
    for _ in range(own):
        take(load, 0, 0.0)
    load.report(EngineLoad(running, waiting), 0.0)
    assert (load.in_flight, load.others_in_flight, load.total_in_flight) == (own, others, own + others)


def test_what_others_have_in_the_queue_counts_as_so_many_requests_like_ours() -> None:
    load = load_of()
    for _ in range(200):  # long enough for the mean to be theirs
        load.release(take(load, 800, 0.0), 0.0)
    take(load, 0, 0.0)
    load.report(EngineLoad(running=1, waiting=3), 0.0)
    assert load.others_in_flight == 3
    assert load.waiting_tokens == approx(
        3 * 760 + 4 * 10, rel=1e-3
    )  # of four requests one is ours, of three that wait none
    load.report(EngineLoad(running=1, waiting=0), 0.1)
    assert load.waiting_tokens == approx(10)
    load.report(EngineLoad(running=1, waiting=3), 0.2)
    load.pass_time(6.0)  # too old
    assert load.waiting_tokens == approx(10)


def test_figures_that_are_too_old_no_longer_count() -> None:
    load = load_of()
    load.report(EngineLoad(running=4, waiting=0), 10.0)
    assert load.pass_time(15.0) is False
    assert load.waiting_tokens == 40
    assert load.pass_time(15.1) is True
    assert load.waiting_tokens == 0
    load.report(EngineLoad(running=4, waiting=0), 16.0)
    assert load.pass_time(16.0) is False


@pytest.mark.parametrize(("said", "capacity"), [(None, 400_000), (0, 400_000), (-1, 400_000), (50_000, 50_000)])
def test_the_cache_size_is_taken_from_the_engine_where_it_says_one(said: int | None, capacity: int) -> None:
    load = load_of()
    load.report(EngineLoad(0, 0, capacity_tokens=said), 0.0)
    assert load.capacity_tokens == capacity


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_that_nothing_can_be_divided_by_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        Replica("replica-0", "10.0.0.0:8000", weight=weight)


# Whatever happens

steps = st.tuples(
    st.sampled_from(["take", "first token", "release", "pass"]),
    st.integers(0, 5),
    st.floats(0, 5000),
    st.floats(0, 3),
    st.booleans(),
)


@given(st.lists(steps, max_size=40))
def test_the_ledger_is_never_negative_and_ends_at_nothing(
    history: list[tuple[str, int, float, float, bool]],
) -> None:
    load, now_s = load_of(), 0.0
    leases: list[Lease] = []
    for step, index, tokens, later_s, streamed in history:
        now_s += later_s
        match step:
            case "take":
                leases.append(take(load, tokens, now_s, streamed=streamed))
            case "first token" if leases:
                load.first_token(leases[index % len(leases)], now_s)
            case "release" if leases:
                load.release(leases.pop(index % len(leases)), now_s)
            case _:
                load.pass_time(now_s)
        outstanding = sum(lease.uncached_tokens for lease in leases)
        assert 0.0 <= load.ledger_tokens <= outstanding + 1e-6
        assert load.in_flight == len(leases)
        assert load.waiting_tokens == load.ledger_tokens + 10.0 * len(leases)
    for lease in leases:
        load.release(lease, now_s)
    assert (load.ledger_tokens, load.in_flight, load.waiting_tokens) == (0.0, 0, 0.0)
