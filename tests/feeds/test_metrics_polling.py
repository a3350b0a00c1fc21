"""Polling of engine metrics against real servers, one of them the exposition that vLLM mounts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
import uvicorn
from prometheus_client import make_asgi_app

from demo.ports import free_port
from demo.wait import until
from extproc.core.replica import EngineLoad, Replica
from extproc.feeds.engine_metrics import EngineMetrics, LoadSettings
from serve_app.engine.metrics import EngineMetrics as VllmFamilies
from tests.feeds.replica_server import ReplicaServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

QUICK = LoadSettings(poll_s=0.05, timeout_s=0.5)
IDLE = b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"


class Reports:
    """What a poller reports, by replica."""

    def __init__(self) -> None:
        self.loads: dict[str, list[EngineLoad]] = {}

    def __call__(self, replica_id: str, load: EngineLoad) -> None:
        self.loads.setdefault(replica_id, []).append(load)

    async def of(self, replica_id: str, at_least: int = 1) -> EngineLoad:
        async def there() -> bool:
            return len(self.loads.get(replica_id, ())) >= at_least

        await until(there, f"{at_least} reports of {replica_id}")
        return self.loads[replica_id][-1]


@contextlib.asynccontextmanager
async def polling(*members: Replica) -> AsyncIterator[Reports]:
    reports = Reports()
    task = asyncio.create_task(EngineMetrics(QUICK, lambda: members, reports).run())
    try:
        yield reports
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_an_engine_is_asked_for_the_families_that_matter_only() -> None:
    """prometheus_client's own application, which is what answers at /metrics/ of a vLLM server."""
    families = VllmFamilies("sim", block_tokens=16, capacity_blocks=100)
    families.follow(lambda: 3, lambda: 2, lambda: 0.5)
    families.scheduled(prompt_tokens=1000, cached_tokens=600, queued_s=0.1)
    exposition = make_asgi_app(families._registry)
    sizes: list[int] = []
    paths: list[str] = []

    async def app(scope, receive, send):  # type: ignore[no-untyped-def]
        async def measured(message):  # type: ignore[no-untyped-def]
            sizes.append(len(message.get("body", b"")))
            await send(message)

        paths.append(scope["path"])
        await exposition(scope, receive, measured)

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, lifespan="off", log_level="error"))
    serving = asyncio.create_task(server.serve())
    try:
        async with polling(Replica("a", f"127.0.0.1:{port}")) as reports:
            load = await reports.of("a", at_least=3)
    finally:
        server.should_exit = True
        await serving
    assert load == EngineLoad(3, 2, 0.5, capacity_tokens=1600, prompt_tokens_computed=400, prompt_tokens_cached=600)
    assert set(paths) == {"/metrics/"}
    assert max(sizes) < len(families.render()) / 3


async def test_an_engine_that_does_not_know_that_question_is_asked_for_the_whole_page() -> None:
    async with ReplicaServer({"/metrics": (200, IDLE)}) as server, polling(server.replica()) as reports:
        assert await reports.of("a", at_least=3) == EngineLoad(0, 0)
        assert [target.partition("?")[0] for target in server.asked[:4]] == ["/metrics/", *["/metrics"] * 3]


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html><body>Bad gateway</body></html>",
        IDLE.replace(b"running 0.0", b"running NaN"),
        IDLE.replace(b"running 0.0", b"running -1"),
        IDLE.replace(b"running 0.0", b"running 1e300"),
        IDLE + b'vllm:cache_config_info{block_size="999999999",num_gpu_blocks="999999999"} 1.0\n',
        IDLE + b"vllm:prefix_cache_queries_total 5.0\nvllm:prefix_cache_hits_total 6.0\n",
    ],
)
async def test_a_lying_engine_is_not_believed_and_harms_no_other(page: bytes) -> None:
    pages = {"/metrics": (200, page), "/metrics/": (200, page)}
    good = {"/metrics": (200, IDLE), "/metrics/": (200, IDLE)}
    async with (
        ReplicaServer(pages) as liar,
        ReplicaServer(good) as honest,
        polling(liar.replica("liar"), honest.replica("honest")) as reports,
    ):
        await reports.of("honest", at_least=3)
        assert "liar" not in reports.loads
        liar.pages = good
        assert await reports.of("liar") == EngineLoad(0, 0)


async def test_a_hanging_engine_harms_no_other() -> None:
    good = {"/metrics/": (200, IDLE)}
    async with (
        ReplicaServer(good, hang=True) as hanging,
        ReplicaServer(good) as well,
        polling(hanging.replica("hanging"), well.replica("well")) as reports,
    ):
        await reports.of("well", at_least=5)
        assert "hanging" not in reports.loads
        hanging.hang = False
        await reports.of("hanging")


async def test_one_connection_per_engine_is_kept() -> None:
    async with ReplicaServer({"/metrics/": (200, IDLE)}) as server, polling(server.replica()) as reports:
        await reports.of("a", at_least=5)
        assert server.connections == 1
