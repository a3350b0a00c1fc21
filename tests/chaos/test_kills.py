"""The two plainest faults: the router is killed, a replica is killed."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import pytest

from tests.chaos.figures import Figures, figures
from tests.chaos.load import steady_load
from tests.chaos.promises import assert_only_begun_answers_lost, assert_unnoticed

if TYPE_CHECKING:
    from tests.chaos.site import Site

pytestmark = pytest.mark.e2e


async def test_the_router_is_killed_and_started_again(running: Site, rows: list[Figures]) -> None:
    async with steady_load(running.envoy.url) as load:
        await load.rounds(3)
        fault_s = monotonic()
        running.router.process.kill()
        await load.rounds(3)
        running.router.start()
        await running.router.wait()
        back_s = monotonic()
        await load.rounds(4)
    rows.append(row := figures("router: kill -9, restart", load.exchanges, fault_s, back_s))
    assert_unnoticed(row)


async def test_a_replica_is_killed(running: Site, rows: list[Figures]) -> None:
    """For good: its sessions find another home, the others stay."""
    async with steady_load(running.envoy.url) as load:
        await load.rounds(3)
        victim = running.busiest(load)
        await load.answering(victim.id)
        fault_s = monotonic()
        victim.process.kill()
        await load.rounds(8)
    rows.append(row := figures("replica: kill -9", load.exchanges, fault_s, fault_s, {victim.id}))
    assert_only_begun_answers_lost(row, load, fault_s, victim)
    assert row.cut > 0, "it was answering"
