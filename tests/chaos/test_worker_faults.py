"""The router's processes fail, one by one, under load: clients notice no more than when the whole router does."""

from __future__ import annotations

import asyncio
import os
import signal
from time import monotonic
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from demo.wait import until
from extproc.workers.remote import ANSWER_LIMIT_S
from tests.chaos.figures import Figures, figures
from tests.chaos.load import steady_load
from tests.chaos.promises import assert_unnoticed
from tests.chaos.site import Site, site
from tests.chaos.test_router_faults import ANSWER_S, TIMEOUT_S
from tests.workers.serving import children

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.chaos

WORKERS = {"EXTPROC_SERVER__WORKERS": "2"}


@pytest_asyncio.fixture
async def running(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path, env=WORKERS, envoy_threads=2) as running:
        await all_serve(running)
        yield running


async def all_serve(site: Site, times: int = 2) -> None:
    """Wait until workers have begun to serve so many times."""

    async def serving() -> bool:
        return site.router.process.log().count('"worker serving"') >= times

    await until(serving, f"{times} x worker serving", 30.0)


async def nothing_is_left(site: Site) -> None:
    await site.router.wait_for_metric("extproc_open_leases", 0)
    assert len(children(site.router.process.pid)) == 2


async def test_each_worker_is_killed(running: Site, rows: list[Figures]) -> None:
    async def sent_away() -> bool:
        return await asyncio.to_thread(running.envoy.stat, "cluster.extproc.upstream_cx_close_notify") > 0

    async with steady_load(running.envoy.url) as load:
        await load.rounds(3)
        fault_s = monotonic()
        for times, worker in enumerate(children(running.router.process.pid), start=3):
            os.kill(worker, signal.SIGKILL)
            await all_serve(running, times)
            await load.rounds(2)
        back_s = monotonic()
        await until(sent_away, "the last one is given a connection of the other's", 20.0)
        await load.rounds(4)
    rows.append(row := figures("router: kill -9 of each worker", load.exchanges, fault_s, back_s))
    assert_unnoticed(row)
    await nothing_is_left(running)


async def test_a_worker_freezes(running: Site, rows: list[Figures]) -> None:
    """Until its parent replaces it, requests on its connections wait for Envoy's patience."""
    async with steady_load(running.envoy.url) as load:
        await load.rounds(3)
        fault_s = monotonic()
        os.kill(min(children(running.router.process.pid)), signal.SIGSTOP)
        await all_serve(running, 3)
        back_s = monotonic()
        await load.rounds(4)
    rows.append(row := figures("router: SIGSTOP of a worker", load.exchanges, fault_s, back_s))
    assert_unnoticed(row)
    assert row.slowest_s < TIMEOUT_S + ANSWER_S, row
    await nothing_is_left(running)


async def test_the_parent_freezes(running: Site, rows: list[Figures]) -> None:
    """Its workers soon do without it."""
    async with steady_load(running.envoy.url) as load:
        await load.rounds(3)
        fault_s = monotonic()
        running.router.process.send(signal.SIGSTOP)
        await asyncio.sleep(5.0)  # the fault itself
        running.router.process.send(signal.SIGCONT)
        back_s = monotonic()
        await load.rounds(8)
    rows.append(row := figures("router: SIGSTOP of the parent for 5 s", load.exchanges, fault_s, back_s))
    assert_unnoticed(row)
    assert row.slowest_s < ANSWER_LIMIT_S + ANSWER_S, row
    await nothing_is_left(running)


async def test_the_parent_is_killed_and_started_again(running: Site, rows: list[Figures]) -> None:
    async with steady_load(running.envoy.url) as load:
        await load.rounds(3)
        fault_s = monotonic()
        running.router.process.kill()
        await load.rounds(3)
        running.router.start()
        await running.router.wait()
        back_s = monotonic()
        await load.rounds(4)
    rows.append(row := figures("router: kill -9 of the parent, restart", load.exchanges, fault_s, back_s))
    assert_unnoticed(row)
    await nothing_is_left(running)


async def test_asked_to_leave(running: Site, rows: list[Figures]) -> None:
    async with steady_load(running.envoy.url) as load:
        await load.rounds(3)
        fault_s = monotonic()
        running.router.process.send(signal.SIGTERM)
        assert await asyncio.to_thread(running.router.process.wait, 30.0) == 0
        assert monotonic() - fault_s < 5.0  # two seconds' notice, then streams of 0.2 s
        await load.rounds(3)
        running.router.start()
        await running.router.wait()
        back_s = monotonic()
        await load.rounds(4)
    rows.append(row := figures("router: SIGTERM with workers, restart", load.exchanges, fault_s, back_s))
    assert_unnoticed(row)
    assert row.slowest_s < TIMEOUT_S, row
