"""The router fails under load: clients may notice a cache miss, and nothing else."""

from __future__ import annotations

import asyncio
import signal
from time import monotonic
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from demo.wait import until
from extproc.envoy_config import EnvoySettings
from tests.chaos.figures import Figures, figures
from tests.chaos.load import steady_load
from tests.chaos.promises import assert_unnoticed
from tests.chaos.site import Site, site

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.chaos

TIMEOUT_S = EnvoySettings().message_timeout_s
ANSWER_S = 0.5
"""An answer takes 0.2 s; more than this and the message timeout nobody waits, a busy machine's pauses aside."""
SERVING = health_pb2.HealthCheckResponse.SERVING


async def test_asked_to_leave(running: Site, rows: list[Figures]) -> None:
    """It says so first, serves on meanwhile, and ends when the requests that it has routed have ended."""
    spoken: list[int] = []

    async def listen(health: health_pb2_grpc.HealthStub) -> None:
        async for answer in health.Watch(health_pb2.HealthCheckRequest(service="readiness")):
            spoken.append(answer.status)  # noqa: PERF401  # one by one, as they are said

    channel = grpc.aio.insecure_channel(f"127.0.0.1:{running.router.port}")
    async with channel, steady_load(running.envoy.url) as load:
        listener = asyncio.create_task(listen(health_pb2_grpc.HealthStub(channel)))
        await load.rounds(3)
        assert spoken == [SERVING]
        fault_s = monotonic()
        running.router.process.send(signal.SIGTERM)

        async def said() -> bool:
            return spoken[-1] != SERVING

        await until(said, "it says that it leaves", 2.0)
        listener.cancel()
        routed = running.envoy.stat("http.clients.ext_proc.stream_msgs_received")
        assert not running.router.process.has_ended, "it says so before it is gone"
        assert await asyncio.to_thread(running.router.process.wait, 30.0) == 0
        gone_s = monotonic()
        assert gone_s - fault_s < 5.0  # two seconds' notice, then streams of 0.2 s
        assert running.envoy.stat("http.clients.ext_proc.stream_msgs_received") > routed, "it served meanwhile"
        await load.rounds(3)
        running.router.start()
        await running.router.wait()
        back_s = monotonic()
        await load.rounds(4)
    rows.append(row := figures("router: SIGTERM, restart", load.exchanges, fault_s, back_s))
    assert_unnoticed(row)
    assert row.slowest_s < TIMEOUT_S, row


async def test_frozen(running: Site, rows: list[Figures]) -> None:
    async with steady_load(running.envoy.url) as load:
        await load.rounds(3)
        fault_s = monotonic()
        running.router.process.send(signal.SIGSTOP)
        await asyncio.sleep(5.0)  # the fault itself
        running.router.process.send(signal.SIGCONT)
        back_s = monotonic()
        await load.rounds(8)
    rows.append(row := figures("router: SIGSTOP for 5 s", load.exchanges, fault_s, back_s))
    assert_unnoticed(row)
    assert row.slowest_s < TIMEOUT_S + ANSWER_S, row
    await running.router.wait_for_metric("extproc_open_leases", 0)


async def test_hanging(running: Site, rows: list[Figures]) -> None:
    """Connections stay open and are accepted, but nothing comes back."""
    async with steady_load(running.envoy.url) as load:
        await load.rounds(3)
        fault_s = monotonic()
        running.router.relay.flowing.clear()
        await asyncio.sleep(5.0)  # the fault itself
        running.router.relay.flowing.set()
        back_s = monotonic()
        await load.rounds(8)
    rows.append(row := figures("router: nothing passes for 5 s", load.exchanges, fault_s, back_s))
    assert_unnoticed(row)
    assert row.slowest_s < TIMEOUT_S + ANSWER_S, row
    await running.router.wait_for_metric("extproc_open_leases", 0)


async def test_slow(running: Site, rows: list[Figures]) -> None:
    """200 ms from Envoy to the router and back: felt by each request, but no reason to do without it."""
    async with steady_load(running.envoy.url) as load:
        await load.rounds(3)
        fault_s = monotonic()
        running.router.relay.delay_s = 0.1
        await load.rounds(5)
        running.router.relay.delay_s = 0.0
        back_s = monotonic()
        await load.rounds(4)
    rows.append(row := figures("router: slow by 200 ms", load.exchanges, fault_s, back_s))
    assert_unnoticed(row)
    assert row.slowest_s < TIMEOUT_S, row
    homes = {each.session: each.replica for each in load.exchanges if each.ended_s < fault_s}
    assert all(each.replica == homes[each.session] for each in load.exchanges), "it is asked all the while"


async def test_restarted_again_and_again(running: Site, rows: list[Figures]) -> None:
    async with steady_load(running.envoy.url) as load:
        await load.rounds(3)
        fault_s = monotonic()
        for stop in ("kill", "stop", "kill", "kill", "stop"):
            await asyncio.to_thread(getattr(running.router.process, stop))
            running.router.start()
            await running.router.wait()
        back_s = monotonic()
        await load.rounds(4)
    rows.append(row := figures("router: five restarts", load.exchanges, fault_s, back_s))
    assert_unnoticed(row)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=["kill", "freeze", "leave"])
async def test_one_of_two_instances_is_gone(tmp_path: Path, rows: list[Figures], how: signal.Signals) -> None:
    """The other one does what both did: they hash alike."""
    async with site(tmp_path, routers=2) as running, steady_load(running.envoy.url) as load:
        await load.rounds(3)
        fault_s = monotonic()
        running.routers[0].process.send(how)
        await load.rounds(3)

        async def left() -> bool:
            return "failed_active_hc" in await asyncio.to_thread(running.envoy.admin, "/clusters")

        await until(left, "envoy leaves it alone")
        left_s = monotonic()
        await load.rounds(4)
        running.routers[0].process.kill()
        running.routers[0].start()
        await running.routers[0].wait()
        await load.rounds(4)
    rows.append(row := figures(f"router: one of two, {how.name}", load.exchanges, fault_s, left_s))
    assert_unnoticed(row)
    assert row.slowest_s < TIMEOUT_S + ANSWER_S, row
