"""The real `extproc serve --workers 2`: its connections, its leases, its reloads, its deaths."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import pytest

from demo.process import Process
from demo.wait import until, wait_until
from extproc.workers.supervisor import FIRST_PAUSE_S
from tests.component.serving import SERVE
from tests.hostile.certificates import ROUTER_NAME, Certificates
from tests.workers.serving import Client, ServingByWorkers, is_alive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.workers.serving import OpenRequest

ENDPOINTS = ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
ESTABLISHED = "01"
STEADY = {"routing": {"prefill_tokens_per_s": 0.001, "slow_start_s": 0.0, "reuse_weight": 0.0}}
"""So that time alone changes nothing."""


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[ServingByWorkers]:
    with ServingByWorkers(tmp_path, STEADY) as serving:
        serving.fleet(*ENDPOINTS)
        serving.wait_for("ready")
        serving.wait_for("worker serving", 2)
        serving.wait_ready(serving.is_ready, "a worker says so")
        yield serving


def turn(user: int, number: int) -> bytes:
    said = [{"role": "user", "content": f"{user} asks {each}. " * 50} for each in range(number + 1)]
    return json.dumps({"model": "m", "messages": said}).encode()


async def routes(serving: ServingByWorkers, clients: list[Client]) -> list[tuple[str | None, object]]:
    """A sequence of requests, by these connections in turn, whose streams end now and then; what came of each."""
    open_: list[OpenRequest] = []
    seen: list[tuple[str | None, object]] = []
    held: dict[str, int] = dict.fromkeys(ENDPOINTS, 0)
    for step in range(300):
        client = clients[step % len(clients)]
        request = await client.open(turn(step * 7 % 23, step // 100), **{"x-session-id": f"user-{step * 7 % 23}"})
        open_.append(request)
        assert request.endpoint is not None
        held[request.endpoint] += 1
        if step % 3 == 2:
            for _ in range(2):
                ended = open_.pop(step * 5 % len(open_))
                assert ended.endpoint is not None
                held[ended.endpoint] -= 1
                await ended.end()
        await asyncio.to_thread(serving.wait_in_flight, {each: count for each, count in held.items() if count})
        seen.append((request.endpoint, dict(held)))
    for each in open_:
        await each.end()
    return seen


async def test_two_workers_route_like_one_process(serving: ServingByWorkers, tmp_path: Path) -> None:
    """The same endpoints, and the same requests in flight after each step."""
    directory = tmp_path / "alone"
    directory.mkdir()
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(serving.client()) for _ in range(2)]
        by_workers = await routes(serving, clients)
        workers_cpu = [cpu_ticks(pid) for pid in serving.workers()]
        await asyncio.to_thread(serving.wait_in_flight, {})
    with ServingByWorkers(directory, STEADY, workers=1) as alone:
        alone.fleet(*ENDPOINTS)
        alone.wait_for("ready")
        assert not alone.workers()
        async with alone.client() as client:
            assert await routes(alone, [client]) == by_workers
    assert len({endpoint for endpoint, _ in by_workers}) == 3
    assert min(workers_cpu) > 0.3 * max(workers_cpu), "both have worked"


def cpu_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_a_worker_that_is_killed_leaves_no_lease_and_is_replaced(serving: ServingByWorkers) -> None:
    async with serving.client() as one, serving.client() as other:
        held = [await client.open() for client in (one, other) for _ in range(5)]
        assert sum(serving.in_flight().values()) == 10
        victim = serving.workers().pop()
        os.kill(victim, signal.SIGKILL)
        ended = await asyncio.to_thread(serving.wait_for, "worker ended")
        assert (ended["pid"], ended["status"], ended["leases"]) == (victim, -9, 5)
        assert sum(serving.in_flight().values()) == 5
        await asyncio.to_thread(wait_until, lambda: len(serving.workers() - {victim}) == 2, "there is another one")
        for client in (one, other):  # one of them has to connect again
            assert (await client.open()).endpoint in ENDPOINTS
        assert len(held) == 10
        assert 'extproc_stream_errors_total{kind="worker"} 5.0' in serving.page("/metrics")
    await asyncio.to_thread(serving.wait_in_flight, {})


async def test_a_new_worker_gets_its_share_and_no_call_is_lost(serving: ServingByWorkers) -> None:
    """All clients have come to the other one while there was no second."""
    os.kill(serving.workers().pop(), signal.SIGKILL)
    await asyncio.to_thread(serving.wait_for, "worker ended")
    (old,) = serving.workers()
    asked, ended = 0, asyncio.Event()

    async def ask(client: Client) -> None:
        nonlocal asked
        while not ended.is_set():
            await (await client.open()).end()
            asked += 1

    async def level() -> bool:
        return [connections(pid) for pid in serving.workers() - {old}] == [2]

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(serving.client()) for _ in range(4)]
        asking = [asyncio.create_task(ask(client)) for client in clients]
        await until(lambda: asyncio.sleep(0, asked > 20), "all are served")
        assert connections(old) >= 4
        await until(level, "the new one has half of them", 20.0)
        ended.set()
        await asyncio.gather(*asking)
    await asyncio.to_thread(serving.wait_in_flight, {})


def connections(pid: int) -> int:
    """Established ones of a process: `ss` without ss."""
    own = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            own.add(os.readlink(each))
    table = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    return sum(f"socket:[{line.split()[9]}]" in own and line.split()[3] == ESTABLISHED for line in table)


def test_one_that_is_frozen_is_replaced(serving: ServingByWorkers) -> None:
    frozen = serving.workers().pop()
    os.kill(frozen, signal.SIGSTOP)
    serving.wait_for("worker does not answer")
    assert serving.wait_for("worker ended")["pid"] == frozen
    wait_until(lambda: len(serving.workers() - {frozen}) == 2, "there is another one")


def test_those_that_die_at_once_are_started_ever_more_seldom(serving: ServingByWorkers) -> None:
    for times in (2, 4, 6):
        serving.wait_for("worker serving", times)
        for pid in serving.workers():
            os.kill(pid, signal.SIGKILL)
        serving.wait_for("worker ended", times)
    serving.wait_for("worker serving", 8)
    first, *_, last = (datetime.fromisoformat(each["timestamp"]) for each in serving.events("worker ended"))
    assert (last - first).total_seconds() > FIRST_PAUSE_S + 2 * FIRST_PAUSE_S


async def went(serving: ServingByWorkers, client: Client, header: str) -> str | None:
    """Where a request of a session goes, if this header names one. Nothing is left of it for the next."""
    request = await client.open(**{header: "a"})
    await request.end()
    await asyncio.to_thread(serving.wait_in_flight, {})
    return request.endpoint


async def test_a_reload_reaches_the_workers(serving: ServingByWorkers) -> None:
    serving.sections["features"] = {"session_headers": ["x-mine"]}
    serving.sections["server"]["workers"] = 2
    serving.write()
    serving.send(signal.SIGHUP)
    reloaded = await asyncio.to_thread(serving.wait_for, "configuration reloaded")
    assert (reloaded["changed"], reloaded["after_restart"]) == (["features"], [])
    async with serving.client() as one, serving.client() as other:
        clients = (one, other) * 3
        assert len({await went(serving, client, "x-mine") for client in clients}) == 1
        assert len({await went(serving, client, "x-session-id") for client in clients}) > 1, "it names none any more"


async def test_what_breaks_a_stream_is_counted_by_the_parent(serving: ServingByWorkers) -> None:
    async with serving.client() as one, serving.client() as other:
        for client in (one, other):
            await client.say_nonsense()
    expected = 'extproc_stream_errors_total{kind="unknown_message"} 2.0'
    await asyncio.to_thread(wait_until, lambda: expected in serving.page("/metrics"), "both are counted")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_ends_when_its_streams_have(serving: ServingByWorkers, number: signal.Signals) -> None:
    workers = serving.workers()
    async with serving.client() as client:
        held = await client.open()
        for pid in (*workers, serving.pid):  # as a terminal or a process manager does
            os.kill(pid, number)
        await asyncio.to_thread(serving.wait_for, "leaving")
        assert not serving.has_ended
        await held.end()
        assert await asyncio.to_thread(serving.wait) == 0
    assert not any(is_alive(pid) for pid in workers)
    assert "Traceback" not in serving.log()
    assert not serving.events("worker ended")


def test_it_ends_at_once_while_a_worker_is_yet_to_be_started_again(serving: ServingByWorkers) -> None:
    for pid in serving.workers():
        os.kill(pid, signal.SIGKILL)
    serving.wait_for("worker ended", 2)
    began_s = monotonic()
    serving.send(signal.SIGTERM)
    assert serving.wait() == 0
    assert monotonic() - began_s < 1.9  # less than what streams are given


async def test_clients_that_come_while_no_worker_serves_are_served_later(serving: ServingByWorkers) -> None:
    for pid in serving.workers():
        os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(serving.wait_for, "worker ended", 2)
    async with serving.client() as client:
        assert (await client.open()).endpoint in ENDPOINTS
    assert "Traceback" not in serving.log()


async def test_streams_that_do_not_end_are_cut(serving: ServingByWorkers) -> None:
    async with serving.client() as client:
        await client.open()
        serving.send(signal.SIGTERM)
        assert await asyncio.to_thread(serving.wait) == 0


async def test_over_tls_with_a_certificate_that_is_renewed(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    settings = certificates.server_settings(mutual=False)
    env = {
        "EXTPROC_SERVER__TLS_CERTIFICATE": settings.tls_certificate,
        "EXTPROC_SERVER__TLS_KEY": settings.tls_key,
    }
    with ServingByWorkers(tmp_path, STEADY, env=env) as serving:
        serving.fleet(*ENDPOINTS)
        serving.wait_for("ready")
        for _ in range(2):
            authority = certificates.ca.read_bytes()
            clients = [Client(f"127.0.0.1:{serving.port}", authority, ROUTER_NAME) for _ in range(2)]
            for client in clients:
                async with client:
                    assert (await client.open()).endpoint in ENDPOINTS
            certificates.change_authority()


async def test_over_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "router.sock"
    with ServingByWorkers(tmp_path, STEADY, env={"EXTPROC_SERVER__LISTEN": f"unix:{path}"}) as serving:
        serving.fleet(*ENDPOINTS)
        serving.wait_for("ready")
        async with Client(f"unix:{path}") as client:
            assert (await client.open()).endpoint in ENDPOINTS
        serving.send(signal.SIGTERM)
        assert await asyncio.to_thread(serving.wait) == 0
    assert not path.exists()


def test_a_certificate_that_cannot_be_is_said_so(tmp_path: Path) -> None:
    env = {"EXTPROC_SERVER__TLS_CERTIFICATE": "/nowhere.pem", "EXTPROC_SERVER__TLS_KEY": "/nowhere-key.pem"}
    process = Process([*SERVE, "--workers", "2"], tmp_path / "log", {"EXTPROC_ADMIN__LISTEN": "", **env})
    assert process.wait(20) == 1
    assert "server.tls_certificate /nowhere.pem" in process.log()
    assert "Traceback" not in process.log()


def test_workers_end_with_their_parent(serving: ServingByWorkers) -> None:
    workers = serving.workers()
    serving.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in workers), "the workers are gone")


def test_a_port_in_use_is_said_so(serving: ServingByWorkers, tmp_path: Path) -> None:
    argv = [*SERVE, "--config", serving.file, "--workers", "3"]
    second = Process(argv, tmp_path / "second.log", {"EXTPROC_ADMIN__LISTEN": ""})
    assert second.wait(20) == 1
    assert f"127.0.0.1:{serving.port}" in second.log()
    assert "Traceback" not in second.log()


@pytest.mark.parametrize(
    ("workers", "env", "error"),
    [
        ("0", {}, "EXTPROC_SERVER__WORKERS: server: workers must be at least 1"),
        ("many", {}, "EXTPROC_SERVER__WORKERS: server.workers: Input should be a valid integer"),
        ("2", {"EXTPROC_SERVER__TRANSPORT": "grpcio"}, 'more than one of workers needs transport = "http2"'),
    ],
)
def test_workers_that_cannot_be_are_said_so(tmp_path: Path, workers: str, env: dict[str, str], error: str) -> None:
    process = Process([*SERVE, "--workers", workers], tmp_path / "log", env)
    assert process.wait(20) == 2
    assert error in process.log()
    assert "Traceback" not in process.log()
