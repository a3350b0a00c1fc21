"""What the router is told fails, or is a lie: it goes on by what it knew, and shows `stale`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

import pytest

from demo.ports import free_port
from demo.wait import until
from tests.chaos.figures import Figures, figures
from tests.chaos.load import steady_load
from tests.chaos.promises import assert_unnoticed
from tests.chaos.relay import Relay
from tests.chaos.site import Replica, Site, site
from tests.feeds.replica_server import ReplicaServer
from tests.feeds.test_ray_serve import answer, group, listed, target

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

pytestmark = pytest.mark.chaos

PATH = "/api/serve/applications/"
CONSOLE = {"telemetry": {"exporter": "console"}}
OK = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s"
ABSURD = b"vllm:num_requests_running 1e300\nvllm:num_requests_waiting -7\n"


@dataclass
class ServeApi:
    """A dashboard as Ray's, on which the test may put what it likes."""

    server: ReplicaServer = field(default_factory=ReplicaServer)

    def say(self, body: bytes, status: int = 200) -> None:
        self.server.pages = {PATH: (status, body)}

    def announce(self, replicas: Iterable[Replica]) -> None:
        self.say(applications(replicas))


def applications(replicas: Iterable[Replica]) -> bytes:
    """The true answer."""
    members = [(replica.id, int(replica.relay.address.rpartition(":")[2])) for replica in replicas]
    targets = [target(id_, port) for id_, port in members]
    return json.dumps(answer([group(*targets)], default=[listed(id_) for id_, _ in members])).encode()


def decisions(running: Site) -> list[bool]:
    """Of each decision so far, whether it was shown as stale."""
    lines = running.router.process.log().splitlines()
    return ['"routing.stale": true' in line for line in lines if line.startswith('{"name": "route"')]


FAULTS = ("down", "silent", "500", "empty", "no HTTP", "half an answer", "something else")


async def test_the_serve_api_fails(tmp_path: Path, rows: list[Figures]) -> None:
    api = ServeApi()
    async with api.server, Relay(api.server.endpoint).running() as relay:
        membership = {"source": "ray_serve", "ray_serve_url": f"http://{relay.address}", "poll_s": 0.1}
        async with site(tmp_path, {"membership": membership, **CONSOLE}, announce=api.announce) as running:
            truth = applications(running.replicas)
            for fault in FAULTS:
                async with steady_load(running.envoy.url) as load:
                    await load.rounds(2)
                    before = len(decisions(running))
                    fault_s = monotonic()
                    match fault:
                        case "down":
                            relay.target = f"127.0.0.1:{free_port()}"
                            relay.cut()
                        case "silent":
                            api.server.hang = True
                        case "500":
                            api.say(b"oops", 500)
                        case "empty":
                            api.say(json.dumps(answer([])).encode())
                        case "no HTTP":
                            api.server.raw = b"\x00\xff\r\n\r\n"
                        case "half an answer":
                            api.say(truth[: len(truth) // 2])
                        case _:
                            api.say(b'{"applications": ["sim"], "target_groups": {"a": null}}')
                    await running.router.wait_for_metric("extproc_membership_stale", 1)
                    await load.rounds(2)
                    assert any(decisions(running)[before:]), fault
                    relay.target, api.server.hang, api.server.raw = api.server.endpoint, False, None
                    api.announce(running.replicas)
                    await running.router.wait_for_metric("extproc_membership_stale", 0)
                    back_s = monotonic()
                    await load.rounds(2)
                rows.append(row := figures(f"Serve API: {fault}", load.exchanges, fault_s, back_s))
                assert_unnoticed(row)
            assert await running.router.metric("extproc_membership_version") == 1


async def test_the_serve_api_is_slow(tmp_path: Path, rows: list[Figures]) -> None:
    """1.6 s for an answer: within its time, so nothing is stale, and no decision waits for it."""
    api = ServeApi()
    async with api.server, Relay(api.server.endpoint).running() as relay:
        membership = {"source": "ray_serve", "ray_serve_url": f"http://{relay.address}", "poll_s": 0.1}
        async with (
            site(tmp_path, {"membership": membership, **CONSOLE}, announce=api.announce) as running,
            steady_load(running.envoy.url) as load,
        ):
            await load.rounds(2)
            fault_s = monotonic()
            relay.delay_s = 0.8
            await load.rounds(6)
            relay.delay_s = 0.0
            back_s = monotonic()
            await load.rounds(2)
            assert not any(decisions(running))
    rows.append(row := figures("Serve API: slow by 1.6 s", load.exchanges, fault_s, back_s))
    assert_unnoticed(row)
    assert row.slowest_s < 1.0, row


@pytest.mark.parametrize("lie", ["half of the replicas", "one that is not there"])
async def test_the_serve_api_lies(tmp_path: Path, rows: list[Figures], lie: str) -> None:
    """Well formed, but untrue. What it says is done, and costs nobody an answer."""
    api = ServeApi()
    async with api.server:
        membership = {"source": "ray_serve", "ray_serve_url": f"http://{api.server.endpoint}", "poll_s": 0.1}
        async with (
            site(tmp_path, {"membership": membership}, announce=api.announce) as running,
            steady_load(running.envoy.url) as load,
        ):
            await load.rounds(3)
            half, ghost = running.replicas[:2], Replica("ghost", tmp_path)
            told = half if lie == "half of the replicas" else [*running.replicas, ghost]
            fault_s = monotonic()
            running.announce(told)
            await running.router.wait_for_metric("extproc_replicas", len(told))
            await load.rounds(5)
            running.announce(running.replicas)
            await running.router.wait_for_metric("extproc_replicas", len(running.replicas))
            back_s = monotonic()
            await load.rounds(4)
    rows.append(row := figures(f"Serve API: lists {lie}", load.exchanges, fault_s, back_s))
    assert (row.failed, row.cut, row.moved) == (0, 0, 0), row


@pytest.mark.parametrize("fault", ["gone", "garbage", "absurd"])
async def test_the_engines_metrics_fail(tmp_path: Path, rows: list[Figures], fault: str) -> None:
    """All of them at once: decisions go on by the router's own counts."""
    page = {"gone": b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "garbage": OK % (4, b"\x00\xff{\n")}
    sections = {"load": {"poll_s": 0.1}, "routing": {"load_stale_s": 1.0}, **CONSOLE}
    async with site(tmp_path, sections) as running, steady_load(running.envoy.url) as load:
        await load.rounds(3)
        assert not any(decisions(running))
        fault_s = monotonic()
        for replica in running.replicas:
            replica.relay.canned[b"GET /metrics"] = page.get(fault, OK % (len(ABSURD), ABSURD))

        async def stale() -> bool:
            return decisions(running)[-1]

        await until(stale, "decisions are shown as stale", 20.0)
        await load.rounds(3)
        for replica in running.replicas:
            replica.relay.canned.clear()

        async def fresh() -> bool:
            return not any(decisions(running)[-8:])

        await until(fresh, "decisions are no longer stale", 20.0)
        back_s = monotonic()
        await load.rounds(3)
    rows.append(row := figures(f"engines' metrics: {fault}", load.exchanges, fault_s, back_s))
    assert_unnoticed(row)
