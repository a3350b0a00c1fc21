"""What the router's process lives on fails: its collector, its log's disk, the clock, file descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import os
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import pytest

from demo.wait import until
from tests.chaos.figures import Figures, figures
from tests.chaos.load import steady_load
from tests.chaos.promises import assert_unnoticed
from tests.chaos.relay import Relay
from tests.chaos.site import site
from tests.support.upstreams import Upstream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.chaos

LEFT_S = 10.0
"""A polite end takes two seconds' notice, and what is left of the last answers."""


async def test_the_collector_dies_and_then_hangs(tmp_path: Path, rows: list[Figures]) -> None:
    collector = Upstream()
    await collector.start()
    async with Relay(collector.endpoint).running() as relay:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{relay.address}", "OTEL_BSP_SCHEDULE_DELAY": "100"}
        async with (
            site(tmp_path, {"telemetry": {"exporter": "otlp"}}, env) as running,
            steady_load(running.envoy.url) as load,
        ):
            await load.rounds(2)
            assert collector.seen, "it gets its spans"
            fault_s = monotonic()
            await collector.stop()
            relay.cut()
            await load.rounds(4)
            relay.flowing.clear()
            await load.rounds(4)
            began_s = monotonic()
            await asyncio.to_thread(running.router.process.stop)
            assert monotonic() - began_s < LEFT_S, "it does not wait for the collector"
            running.router.start()
            await running.router.wait()
            back_s = monotonic()
            await load.rounds(4)
    rows.append(row := figures("collector: down, hanging", load.exchanges, fault_s, back_s))
    assert_unnoticed(row)


async def test_the_logs_disk_is_full(tmp_path: Path, rows: list[Figures]) -> None:
    """Neither its log nor its spans can be written, from the first line on."""
    full = 'exec "$@" >/dev/full 2>&1'
    async with site(tmp_path, {"telemetry": {"exporter": "console"}}, shell=full) as running:
        async with steady_load(running.envoy.url) as load:
            await load.rounds(3)
            fault_s = monotonic()
            running.announce(running.replicas[1:])  # something to be logged
            await running.router.wait_for_metric("extproc_replicas", 3)
            running.announce(running.replicas)
            await running.router.wait_for_metric("extproc_replicas", 4)
            back_s = monotonic()
            await load.rounds(4)
        assert not running.router.process.log(), "it had nowhere to write to"
        began_s = monotonic()
        await asyncio.to_thread(running.router.process.stop)
        assert monotonic() - began_s < LEFT_S
    rows.append(row := figures("log: disk full", load.exchanges, fault_s, back_s))
    assert_unnoticed(row)


@pytest.mark.parametrize("jump", ["+30d", "-30d"])
async def test_the_wall_clock_jumps(tmp_path: Path, rows: list[Figures], jump: str) -> None:
    """Leases, ages and timers go by the monotonic clock: nothing expires, and nothing sleeps for a month."""
    package = find_spec("libfaketime")
    assert package is not None
    assert package.origin is not None
    clock = tmp_path / "clock"
    clock.write_text("+0")
    env = {
        "LD_PRELOAD": str(Path(package.origin).parent / "vendor/libfaketime/src/libfaketime.so.1"),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    async with site(tmp_path, env=env) as running:
        async with steady_load(running.envoy.url) as load:
            await load.rounds(3)
            logged = len(running.router.process.log())
            fault_s = monotonic()
            clock.write_text(jump)
            running.announce(running.replicas[1:])
            await running.router.wait_for_metric("extproc_replicas", 3)
            running.announce(running.replicas)
            await running.router.wait_for_metric("extproc_replicas", 4)
            back_s = monotonic()
            await load.rounds(4)
        log = running.router.process.log()
        assert days(log[:logged]).isdisjoint(days(log[logged:])), "the clock has jumped"
        assert await running.router.metric("extproc_membership_stale") == 0
        await running.router.wait_for_metric("extproc_open_leases", 0)
    rows.append(row := figures(f"wall clock: {jump}", load.exchanges, fault_s, back_s))
    assert_unnoticed(row)


def days(log: str) -> set[str]:
    """On which its lines were written."""
    return {line.partition('"timestamp": "')[2][:10] for line in log.splitlines() if line.startswith("{")}


@contextlib.asynccontextmanager
async def idle_connections(port: int, count: int) -> AsyncIterator[None]:
    """Connections that say nothing."""
    writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(count)]
    try:
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


async def test_no_file_descriptors_are_left(tmp_path: Path, rows: list[Figures]) -> None:
    """Not one more connection can be had: what is open goes on, and no replica is blamed for it."""
    async with (
        site(tmp_path, shell='ulimit -n 64; exec "$@"') as running,
        steady_load(running.envoy.url) as load,
    ):
        await load.rounds(3)
        victim = running.busiest(load)
        fault_s = monotonic()
        async with idle_connections(running.router.admin_port, 100):
            fds = f"/proc/{running.router.process.pid}/fd"

            async def exhausted() -> bool:
                return len(os.listdir(fds)) == 64

            await until(exhausted, "no descriptor is left")
            victim.relay.cut()  # now it can't be asked how it is
            await load.rounds(6)
            log = running.router.process.log()
        back_s = monotonic()
        await load.rounds(4)
        assert await running.router.metric("extproc_replicas") == 4
    rows.append(row := figures("router: no descriptor left", load.exchanges, fault_s, back_s))
    assert (row.failed, row.moved) == (0, 0), row
    assert "replica unwell" not in log
    assert len(log) < 100_000, "nor is the log flooded"
