"""Pool: the least loaded member at any time, and the home that grows with a prefix's traffic."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.load import ReplicaLoad
from extproc.core.pool import TRAFFIC_HALF_LIFE_S, TRAFFIC_PREFIXES, LeastWork, Pool, PrefixTraffic
from extproc.core.replica import EngineLoad
from extproc.core.router import RouterSettings
from tests.core.prompts import replicas, signature

LINE = 16
SETTINGS = RouterSettings(saturation_in_flight=LINE, decode_tokens=10.0)


def pool_of(count: int) -> Pool:
    pool = Pool(SETTINGS)
    pool.replace(
        [ReplicaLoad(member, serial, SETTINGS, 0.0, warm=True) for serial, member in enumerate(replicas(count))]
    )
    return pool


# The least of all


@given(
    st.integers(1, 70), st.lists(st.tuples(st.integers(0, 69), st.sampled_from([0.0, 1.0, 2.5, 7.0, 1e15, math.inf])))
)
def test_the_tree_agrees_with_a_scan_the_lowest_slot_winning_ties(size: int, keys: list[tuple[int, float]]) -> None:
    tree, naive = LeastWork(size), [0.0] * size
    for slot in range(size):
        tree.set(slot, 0.0)
    for slot, key in keys:
        tree.set(slot % size, key)
        naive[slot % size] = key
        assert tree.least() == naive.index(min(naive))


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 40)), max_size=40))
def test_the_least_is_below_the_line_while_anybody_is(reports: list[tuple[int, int]]) -> None:
    pool = pool_of(8)
    loads = list(pool.loads.values())
    for index, running in reports:
        loads[index].report(EngineLoad(running, 0), 0.0)
        pool.changed(loads[index])
        below = [load for load in loads if load.total_in_flight <= LINE]
        assert pool.least() is min(below or loads, key=ReplicaLoad.work_tokens)


@pytest.mark.parametrize(("in_flight", "saturated"), [(0, False), (16, False), (17, True)])
def test_the_line_itself_is_not_past_the_line(in_flight: int, saturated: bool) -> None:
    pool = pool_of(1)
    (load,) = pool.loads.values()
    load.report(EngineLoad(in_flight, 0), 0.0)
    assert pool.is_saturated(load) is saturated


# The home of a prefix


@pytest.mark.parametrize(
    ("hot", "others", "home"),
    [
        (0, 10, 1),  # not seen yet
        (1, 99, 1),  # 1% of 8
        (1, 7, 1),  # 1/8 of 8
        (1, 3, 2),  # 1/4 of 8
        (1, 1, 4),
        (10, 0, 8),
    ],
)
def test_a_home_grows_with_the_share_of_traffic(hot: int, others: int, home: int) -> None:
    pool = pool_of(8)
    for name, count in (("hot", hot), ("others", others)):
        for _ in range(count):
            pool.traffic.note(signature(name), 0.0)
    order, size = pool.home(signature("hot"))
    assert size == home
    assert [load.replica.id for load in order] == list(pool.ring.walk(signature("hot")))


def test_a_home_follows_the_membership() -> None:
    pool = pool_of(3)
    assert len(pool.home(signature("hot"))[0]) == 3
    pool.replace([ReplicaLoad(member, 10, SETTINGS, 0.0, warm=True) for member in replicas(1)])
    assert pool.home(signature("hot")) == ([pool.loads["replica-0"]], 1)


def test_conversations_begin_at_different_members_of_a_home() -> None:
    """Under a prefix with all of the traffic, the home is all of the pool."""
    pool = pool_of(5)
    pool.traffic.note(signature("hot"), 0.0)
    order, _ = pool.home(signature("hot"))
    for begin, count, expected in [(0, 2, order[:2]), (4, 2, [order[4], order[0]]), (3, 9, order), (2, 0, [])]:
        assert pool.at_home(signature("hot"), begin.to_bytes(8, "little"), count) == expected


def test_yesterdays_traffic_is_forgotten() -> None:
    traffic = PrefixTraffic()
    for _ in range(8):
        traffic.note(signature("old"), 0.0)
    later_s = 3 * TRAFFIC_HALF_LIFE_S  # 8 requests then weigh as one now
    traffic.note(signature("new"), later_s)
    assert traffic.share(signature("old")) == pytest.approx(0.5)
    assert traffic.share(signature("new")) == pytest.approx(0.5)


@pytest.mark.parametrize("days", [1, 30])
def test_last_nights_traffic_is_forgotten_however_long_the_silence_was(days: int) -> None:
    traffic = PrefixTraffic()
    for _ in range(8):
        traffic.note(signature("old"), 0.0)
    traffic.note(signature("new"), days * 86_400.0)
    assert traffic.share(signature("old")) == pytest.approx(0.0)
    assert traffic.share(signature("new")) == pytest.approx(1.0)


def test_requests_without_a_prefix_are_traffic_too() -> None:
    traffic = PrefixTraffic()
    traffic.note(signature("hot"), 0.0)
    for _ in range(3):
        traffic.note(None, 0.0)
    assert traffic.share(signature("hot")) == 0.25


@pytest.mark.parametrize("step_s", [1.0, 3600.0, 10 * 24 * 3600.0])
def test_shares_hold_for_as_long_as_a_router_runs(step_s: float) -> None:
    traffic, now_s = PrefixTraffic(), 1e7
    for _ in range(100):
        now_s += step_s
        for name in ("hot", "hot", "hot", "cool"):
            traffic.note(signature(name), now_s)
        assert traffic.share(signature("hot")) == pytest.approx(0.75)


def test_a_flood_of_prefixes_pushes_out_the_oldest_only() -> None:
    traffic = PrefixTraffic()
    for number in range(TRAFFIC_PREFIXES + 1):
        traffic.note(signature(str(number)), 0.0)
    assert traffic.share(signature("0")) == 0.0
    assert traffic.share(signature("1")) > 0.0
