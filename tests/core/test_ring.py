"""The ring: who owns which arc, and what moves when the membership changes.

Shares are exact: arc lengths between the points of an independent, naive ring, not counts of sampled keys.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import islice, pairwise
from time import thread_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.ring import VNODES, Ring, points, position

CIRCLE = 2**64
KEYS = [sha256(b"%d" % number).digest()[:16] for number in range(2_000)]

ids = st.text(min_size=1, max_size=12)
weights = st.floats(0.01, 4.0)
fleets = st.dictionaries(ids, weights, min_size=1, max_size=12)
keys = st.binary(min_size=16, max_size=16)


def naive_points(fleet: dict[str, float], vnodes: int = VNODES) -> list[tuple[int, str]]:
    return sorted(
        (point, name) for name, weight in fleet.items() for point in points(name, max(1, round(vnodes * weight)))
    )


def shares(fleet: dict[str, float], vnodes: int = VNODES) -> dict[str, float]:
    """Replica -> the part of all keys whose first choice it is. A point owns the arc that ends in it."""
    ring = naive_points(fleet, vnodes)
    arcs = dict.fromkeys(fleet, 0)
    for (before, _), (point, name) in pairwise([(ring[-1][0] - CIRCLE, ""), *ring]):
        arcs[name] += point - before
    return {name: arc / CIRCLE for name, arc in arcs.items()}


def even(count: int, name: str = "replica") -> dict[str, float]:
    return {f"{name}-{number}": 1.0 for number in range(count)}


# A changed hash would send every conversation of every fleet elsewhere on upgrade.


def test_golden_points() -> None:
    assert points("replica-0", 3) == (7636362867076529067, 17390221254595170353, 5935330903015674901)
    assert points("pod-1", 2) == (4379518063323850708, 10444138411846518568)
    assert points("pod-11", 2) == (13888873482151698610, 10538159406761760550)


@pytest.mark.parametrize(
    ("key", "order"),
    [
        (bytes(16), "13067524"),
        (b"\xff" * 16, "13067524"),
        (sha256(b"a").digest(), "67035142"),
        (sha256(b"b").digest(), "61534702"),
    ],
)
def test_golden_order_of_preference(key: bytes, order: str) -> None:
    assert "".join(name[-1] for name in Ring(even(8)).walk(key)) == order


def test_a_key_lies_where_its_first_8_bytes_say_little_endian() -> None:
    assert position(bytes([1, 0, 0, 0, 0, 0, 0, 0]) + b"more") == 1
    assert position(bytes([0, 0, 0, 0, 0, 0, 0, 1])) == 2**56


def test_names_that_spell_the_same_with_an_index_have_nothing_in_common() -> None:
    assert not set(points("pod-1", 200)) & set(points("pod-11", 200))


def test_a_heavier_replica_keeps_the_points_that_it_had() -> None:
    assert points("replica-0", 640)[:320] == points("replica-0", 320)


# The order of preference


@given(fleets, keys)
def test_a_walk_meets_each_replica_once_in_the_order_of_a_naive_ring(fleet: dict[str, float], key: bytes) -> None:
    ring = naive_points(fleet)
    clockwise = [name for point, name in ring if point >= position(key)] + [name for _, name in ring]
    assert list(Ring(fleet).walk(key)) == list(dict.fromkeys(clockwise))


@given(fleets, keys, st.integers(-1, 20))
def test_the_first_few_are_the_beginning_of_the_walk(fleet: dict[str, float], key: bytes, count: int) -> None:
    ring = Ring(fleet)
    assert ring.first(key, count) == list(ring.walk(key))[: max(0, count)]


def test_an_empty_ring_prefers_nobody() -> None:
    assert list(Ring().walk(KEYS[0])) == []


def test_any_string_is_an_id() -> None:
    assert set(Ring({"\ud800": 1.0, "": 1.0, "ß": 1.0}).walk(KEYS[0])) == {"\ud800", "", "ß"}


# The same members, the same order, however they came together


@given(fleets, st.randoms(use_true_random=False), st.lists(fleets, max_size=4))
def test_order_and_history_of_joins_leave_no_trace(
    fleet: dict[str, float], random: object, past: list[dict[str, float]]
) -> None:
    shuffled = list(fleet.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    ring = Ring()
    for former in past:
        ring.update(former)
    ring.update(dict(shuffled))
    assert len(ring) == len(fleet)
    fresh = Ring(fleet)
    for key in KEYS[:20]:
        assert list(ring.walk(key)) == list(fresh.walk(key))


# What moves


@pytest.mark.parametrize("count", [1, 3, 8, 64])
def test_a_join_moves_about_one_key_in_n_and_only_to_the_newcomer(count: int) -> None:
    ring = Ring(even(count))
    before = [ring.first(key, 1)[0] for key in KEYS]
    ring.update(even(count) | {"newcomer": 1.0})
    after = [ring.first(key, 1)[0] for key in KEYS]
    assert {new for old, new in zip(before, after, strict=True) if old != new} <= {"newcomer"}
    # Exactly: what moved is the newcomer's share of the circle.
    share = shares(even(count) | {"newcomer": 1.0})["newcomer"]
    assert share <= 1.2 / (count + 1)


@given(st.dictionaries(ids, weights, min_size=2, max_size=12), st.data())
def test_a_leave_moves_only_the_keys_of_the_one_who_left(fleet: dict[str, float], data: st.DataObject) -> None:
    leaver = data.draw(st.sampled_from(sorted(fleet)))
    ring = Ring(fleet)
    before = {key: list(ring.walk(key)) for key in KEYS[:50]}
    ring.update({name: weight for name, weight in fleet.items() if name != leaver})
    for key, order in before.items():
        assert list(ring.walk(key)) == [name for name in order if name != leaver]


def test_a_heavier_weight_draws_keys_and_drives_none_away() -> None:
    ring = Ring(even(8))
    before = [ring.first(key, 1)[0] for key in KEYS]
    ring.update(even(8) | {"replica-3": 2.0})
    after = [ring.first(key, 1)[0] for key in KEYS]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"replica-3"}
    assert 0.05 < len(moved) / len(KEYS) < 0.15  # 2/9 - 1/8 = 0.097


# How even


@pytest.mark.parametrize("name", ["replica", "fleet-a", "10.0.0.", "llm#app#", "vllm-7f9c"])
def test_of_64_replicas_the_busiest_has_at_most_a_quarter_above_the_mean(name: str) -> None:
    assert max(shares(even(64, name)).values()) * 64 <= 1.25


def test_shares_are_proportional_to_weights() -> None:
    fleet = {f"{weight}-{number}": weight for weight in (0.5, 1.0, 2.0) for number in range(10)}
    total = sum(fleet.values())  # 10 x (0.5 + 1 + 2) = 35
    owned = shares(fleet)
    for weight in (0.5, 1.0, 2.0):
        together = sum(owned[f"{weight}-{number}"] for number in range(10))
        assert together == pytest.approx(10 * weight / total, rel=0.1)


def test_the_lightest_replica_still_has_a_point() -> None:
    ring = Ring({"heavy": 1.0, "feather": 1e-9})
    assert set(ring.walk(KEYS[0])) == {"heavy", "feather"}


# Bounds


def test_more_replicas_than_a_point_can_name_are_refused_and_change_nothing() -> None:
    ring = Ring(even(3), vnodes=1)
    with pytest.raises(ValueError, match="65536"):
        ring.update(even(65_537))
    assert len(ring) == 3
    assert len(list(islice(ring.walk(KEYS[0]), 10))) == 3


def test_1024_replicas_are_built_within_a_second_and_changed_in_a_quarter() -> None:
    fleet = even(1024)
    build_s, join_s, leave_s = [], [], []
    for _ in range(3):
        began_s = thread_time()
        ring = Ring(fleet)
        built_s = thread_time()
        ring.update(fleet | {"newcomer": 1.0})
        joined_s = thread_time()
        ring.update(fleet)
        left_s = thread_time()
        build_s.append(built_s - began_s)
        join_s.append(joined_s - built_s)
        leave_s.append(left_s - joined_s)
    assert min(build_s) < 1.0
    assert min(join_s) < 0.25
    assert min(leave_s) < 0.25
