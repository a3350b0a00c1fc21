"""Replicas fail under load: only an answer that had begun may be lost."""

from __future__ import annotations

import asyncio
import signal
from time import monotonic
from typing import TYPE_CHECKING

import pytest

from demo.wait import until
from extproc.feeds.health import HealthSettings
from tests.chaos.figures import Figures, figures
from tests.chaos.load import steady_load
from tests.chaos.promises import assert_only_begun_answers_lost

if TYPE_CHECKING:
    from tests.chaos.site import Site

pytestmark = pytest.mark.chaos

BUSY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
NOTICED_S = HealthSettings().timeout_s + HealthSettings().probe_s
"""A replica that accepts connections and says nothing is known to be unwell after so long."""


async def test_reset_mid_stream(running: Site, rows: list[Figures]) -> None:
    """All connections of a replica that lives on."""
    async with steady_load(running.envoy.url) as load:
        await load.rounds(3)
        victim = running.busiest(load)
        await load.answering(victim.id)
        fault_s = monotonic()
        assert victim.relay.cut() > 0
        await load.rounds(4)
    rows.append(row := figures("replica: connections reset", load.exchanges, fault_s, fault_s))
    assert_only_begun_answers_lost(row, load, fault_s, victim)
    assert row.cut > 0, "it was answering"


async def test_frozen_for_a_while(running: Site, rows: list[Figures]) -> None:
    """Who has been sent there waits; from when it is known on, nobody is."""
    async with steady_load(running.envoy.url) as load:
        await load.rounds(3)
        victim = running.busiest(load)
        await load.answering(victim.id)
        fault_s = monotonic()
        victim.process.send(signal.SIGSTOP)
        await asyncio.sleep(2 * NOTICED_S)  # the fault itself
        victim.process.send(signal.SIGCONT)
        back_s = monotonic()
        await load.rounds(8)
    rows.append(row := figures("replica: SIGSTOP for 5 s", load.exchanges, fault_s, back_s))
    assert_only_begun_answers_lost(row, load, fault_s)
    waited = [each for each in load.exchanges if each.began_s < back_s <= each.ended_s and each.replica == victim.id]
    assert all(each.began_s < fault_s + NOTICED_S + 0.5 for each in waited), "nobody is sent there any more"


async def test_frozen_and_then_killed(running: Site, rows: list[Figures]) -> None:
    """As Ray Serve does it: the requests that waited are answered by others."""
    async with steady_load(running.envoy.url) as load:
        await load.rounds(3)
        victim = running.busiest(load)
        await load.answering(victim.id)
        fault_s = monotonic()
        victim.process.send(signal.SIGSTOP)
        await asyncio.sleep(NOTICED_S)  # the fault itself
        victim.process.kill()
        gone_s = monotonic()
        await load.rounds(8)
    rows.append(row := figures("replica: SIGSTOP, kill -9", load.exchanges, fault_s, gone_s, {victim.id}))
    assert_only_begun_answers_lost(row, load, fault_s, victim)


async def test_too_busy(running: Site, rows: list[Figures]) -> None:
    """503 to requests while it is healthy, as Serve answers past `max_queued_requests`."""
    async with steady_load(running.envoy.url) as load:
        await load.rounds(3)
        victim = running.busiest(load)
        await load.answering(victim.id)
        before = running.envoy.stat("cluster.fleet.upstream_rq_retry")
        fault_s = monotonic()
        victim.relay.canned[b"POST"] = BUSY
        await load.rounds(8)
        victim.relay.canned.clear()
        back_s = monotonic()
        await load.rounds(4)
    rows.append(row := figures("replica: 503 while healthy", load.exchanges, fault_s, back_s))
    assert_only_begun_answers_lost(row, load, fault_s)
    assert running.envoy.stat("cluster.fleet.upstream_rq_retry") > before


async def test_listed_before_it_listens(running: Site, rows: list[Figures]) -> None:
    async with steady_load(running.envoy.url) as load:
        await load.rounds(3)
        fault_s = monotonic()
        late = await running.add_replica("late", start=False)
        running.announce([*running.replicas, late])
        await load.rounds(8)
        late.start()
        await late.wait()
        back_s = monotonic()

        async def used() -> bool:
            return late.id in load.homes().values()

        await until(used, "the new one gets its share", 20.0)
        await load.rounds(4)
    everyone = {replica.id for replica in running.replicas}  # any session may find the new one to be its home
    rows.append(row := figures("replica: listed, starts later", load.exchanges, fault_s, back_s, everyone))
    assert_only_begun_answers_lost(row, load, fault_s)


async def test_all_are_redeployed(running: Site, rows: list[Figures]) -> None:
    async with steady_load(running.envoy.url) as load:
        await load.rounds(3)
        old = running.replicas
        new = [await running.add_replica(f"new-{number}") for number in range(len(old))]
        fault_s = monotonic()
        running.announce(new)

        async def replaced() -> bool:
            endpoints = {replica.relay.address for replica in new}
            return await asyncio.to_thread(running.envoy.endpoints) == endpoints

        await until(replaced, "envoy knows the new ones alone")
        for replica in old:
            await asyncio.to_thread(replica.process.stop)
        back_s = monotonic()
        await load.rounds(4)
    gone = {replica.id for replica in old}
    rows.append(row := figures("replicas: all redeployed", load.exchanges, fault_s, back_s, gone))
    assert_only_begun_answers_lost(row, load, fault_s)
    assert set(load.homes().values()) <= {replica.id for replica in new}
