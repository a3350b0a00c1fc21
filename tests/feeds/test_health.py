"""Health probes against real servers, and what they do to the membership."""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic
from typing import TYPE_CHECKING

import pytest

from demo.wait import until
from extproc.core.features import FeatureSettings, extract
from extproc.core.request import Request
from extproc.core.router import Router
from extproc.feeds.health import HealthSettings, ReplicaHealth
from extproc.picker import ResponseStart
from tests.feeds.replica_server import Answer, ReplicaServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from extproc.core.decision import Decision
    from extproc.core.replica import Replica

PATH = "/-/healthz"
WELL = {PATH: (200, b"success")}
QUICK = HealthSettings(probe_s=0.05, timeout_s=0.2)
NEVER = HealthSettings(probe_s=3600.0, timeout_s=1.0)


@contextlib.asynccontextmanager
async def probing(settings: HealthSettings, *members: Replica) -> AsyncIterator[ReplicaHealth]:
    health = ReplicaHealth(settings, lambda: members, lambda: None)
    task = asyncio.create_task(health.run())
    try:
        yield health
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def unwell(health: ReplicaHealth, *ids: str) -> None:
    async def so() -> bool:
        return health.unwell == frozenset(ids)

    await until(so, f"exactly {ids} are unwell")


async def asked(server: ReplicaServer, times: int) -> None:
    async def so() -> bool:
        return len(server.asked) >= times

    await until(so, f"{times} probes")


@pytest.mark.parametrize(
    ("answer", "is_well"),
    [
        ((200, b"success"), True),
        ((404, b"no such page"), True),  # it does not know the question, but lives
        ((401, b"who are you"), True),
        ((503, b"UNHEALTHY"), False),
        ((503, b"DRAINING"), False),
        ((500, b"oops"), False),
    ],
)
async def test_what_an_answer_means(answer: Answer, is_well: bool) -> None:
    async with (
        ReplicaServer({PATH: answer}) as one,
        ReplicaServer({PATH: (503, b"")}) as other,
        probing(QUICK, one.replica("a"), other.replica("b")) as health,
    ):
        await asked(one, 3)
        await unwell(health, *([] if is_well else ["a"]), "b")


async def test_a_replica_that_is_gone_is_unwell_until_it_is_back() -> None:
    server = ReplicaServer(WELL)
    async with server:
        replica = server.replica()
    async with probing(QUICK, replica) as health:
        await unwell(health, "a")
        async with server:
            await unwell(health)


async def test_a_replica_that_does_not_answer_is_unwell() -> None:
    async with ReplicaServer(WELL, hang=True) as server, probing(QUICK, server.replica()) as health:
        await unwell(health, "a")
        server.hang = False
        await unwell(health)


async def test_each_change_is_told_once() -> None:
    told = 0

    def changed() -> None:
        nonlocal told
        told += 1

    async with ReplicaServer({PATH: (503, b"")}) as server:
        health = ReplicaHealth(QUICK, lambda: [server.replica()], changed)
        task = asyncio.create_task(health.run())
        await asked(server, 4)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert told == 1


def decision_for(replica: Replica) -> Decision:
    router = Router()
    router.set_members([replica], monotonic())
    return router.decide(extract(Request("GET", "/v1/models", {}), FeatureSettings()), monotonic())


def answer_start(status: int, served_endpoint: str | None) -> ResponseStart:
    return ResponseStart(status, False, None, None, None, served_endpoint)


@pytest.mark.parametrize(
    ("status", "elsewhere", "probed"),
    [(200, False, False), (404, False, False), (503, False, True), (504, False, True), (200, True, True)],
)
async def test_an_answer_that_looks_bad_brings_the_next_probe_forward(
    status: int, elsewhere: bool, probed: bool
) -> None:
    async with ReplicaServer(WELL) as server, probing(NEVER, server.replica()) as health:
        await asked(server, 1)
        await until_idle(health, server)
        server.pages = {PATH: (503, b"DRAINING")}
        decision = decision_for(server.replica())
        health.response_started(decision, answer_start(status, "127.0.0.1:1" if elsewhere else server.endpoint), 0.1)
        if probed:
            await unwell(health, "a")
        else:
            # The only thing to wait for is that nothing happens: a question of our own, after it would have come.
            health.response_started(decision, answer_start(503, server.endpoint), 0.1)
            await unwell(health, "a")
            assert len(server.asked) == 2


async def until_idle(health: ReplicaHealth, server: ReplicaServer) -> None:
    """The first probe's answer has been taken in, so that another one may be asked."""

    async def idle() -> bool:
        return not health._rounds._asking

    await until(idle, "no probe is on its way")


async def test_an_answer_of_a_replica_that_left_asks_nobody() -> None:
    async with ReplicaServer(WELL) as server, probing(NEVER, server.replica("b")) as health:
        await asked(server, 1)
        await until_idle(health, server)
        health.response_started(decision_for(server.replica("a")), answer_start(503, None), 0.1)
        assert not health._rounds._asking
