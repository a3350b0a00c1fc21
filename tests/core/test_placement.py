"""Placement memory: what it keeps, what goes first, and what it costs."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.memory import bytes_per_entry
from extproc.core.ladder import Rung
from extproc.core.placement import ENDLESS_BYTES, ENTRY_BYTES, HOLDERS, HOLDING_BYTES, PlacementMemory
from tests.core.prompts import signature

A, B, C, D = (signature(name) for name in "ABCD")
ROOMY = 10**9
ONE = ENTRY_BYTES + HOLDING_BYTES
"""An entry with one holder, in bytes."""


def test_holders_come_with_length_and_stamp_the_latest_last() -> None:
    memory = PlacementMemory(10, ROOMY)
    memory.remember([(512, A)], 1, 0.0)
    memory.remember([(512, A)], 2, 5.0)
    memory.remember([(700, A)], 1, 9.0)
    assert list(memory.holders(A).items()) == [(2, (512, 5.0)), (1, (700, 9.0))]
    assert memory.holders(B) == {}


def test_a_ladder_is_known_from_its_deepest_rung_each_with_the_offset_of_the_next() -> None:
    memory = PlacementMemory(10, ROOMY)
    memory.remember([(512, A)], 1, 0.0)
    memory.remember([(2048, C)], 1, 0.0)
    ladder = (Rung(512, A), Rung(1024, B), Rung(2048, C))
    assert memory.known(ladder) == [(2048, ENDLESS_BYTES, memory.holders(C)), (512, 1024, memory.holders(A))]
    assert memory.known(()) == []


def test_beyond_its_entries_the_least_recently_sent_goes() -> None:
    memory = PlacementMemory(2, ROOMY)
    memory.remember([(512, A)], 1, 0.0)
    memory.remember([(512, B)], 1, 0.0)
    memory.remember([(512, A)], 1, 0.0)
    memory.remember([(512, C)], 1, 0.0)
    assert [bool(memory.holders(name)) for name in (A, B, C)] == [True, False, True]
    assert len(memory) == 2


def test_beyond_its_bytes_too_whether_by_entries_or_by_holders() -> None:
    memory = PlacementMemory(10, 2 * ONE)
    memory.remember([(512, A)], 1, 0.0)
    memory.remember([(512, B)], 1, 0.0)
    assert memory.size_bytes == 2 * ONE
    memory.remember([(512, B)], 2, 0.0)  # a holder more than fits: A goes
    assert (memory.holders(A), set(memory.holders(B))) == ({}, {1, 2})
    assert memory.size_bytes == ONE + HOLDING_BYTES


def test_a_signature_that_is_everywhere_keeps_its_latest_holders() -> None:
    memory = PlacementMemory(10, ROOMY)
    for serial in range(HOLDERS + 10):
        memory.remember([(512, A)], serial, 0.0)
    assert list(memory.holders(A)) == list(range(10, HOLDERS + 10))
    assert memory.size_bytes == ENTRY_BYTES + HOLDERS * HOLDING_BYTES


def test_smaller_bounds_hold_at_once() -> None:
    memory = PlacementMemory(4, ROOMY)
    for name in (A, B, C, D):
        memory.remember([(512, name)], 1, 0.0)
    memory.resize(3, ROOMY)
    assert (len(memory), memory.holders(A)) == (3, {})
    memory.resize(3, ONE)
    assert (len(memory), bool(memory.holders(D))) == (1, True)


touches = st.tuples(st.just("touch"), st.sampled_from([A, B, C, D]), st.integers(1, 4))
bounds = st.tuples(st.just("resize"), st.integers(1, 4), st.integers(1, 6))


@given(st.lists(st.one_of(touches, bounds), max_size=60))
def test_agrees_with_a_naive_memory(steps: list[tuple[str, object, object]]) -> None:
    memory, entries, size_bytes = PlacementMemory(4, 3 * ONE), 4, 3 * ONE
    naive: OrderedDict[bytes, list[int]] = OrderedDict()

    def reckoned() -> int:
        return sum(ENTRY_BYTES + HOLDING_BYTES * len(held) for held in naive.values())

    for step in steps:
        match step:
            case ("touch", bytes(name), int(serial)):
                memory.remember([(512, name)], serial, 0.0)
                naive[name] = [other for other in naive.pop(name, []) if other != serial] + [serial]
            case ("resize", int(entries), int(count)):
                size_bytes = count * ONE
                memory.resize(entries, size_bytes)
        while len(naive) > entries or reckoned() > size_bytes:
            naive.popitem(last=False)
        assert {name: list(memory.holders(name)) for name in (A, B, C, D) if memory.holders(name)} == naive
        assert memory.size_bytes == reckoned()


@pytest.mark.parametrize("holders", [1, 3, 16])
def test_the_reckoned_size_is_the_real_one(holders: int) -> None:
    entry_bytes = ENTRY_BYTES + holders * HOLDING_BYTES
    assert entry_bytes == pytest.approx(bytes_per_entry(holders, entries=10_000), rel=0.15)
