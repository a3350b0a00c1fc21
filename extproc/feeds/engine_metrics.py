"""Load as the engines themselves tell it: vLLM's /metrics, all replicas at once, every half second.

Names as of vLLM 0.32. The page is over 100 KB of which six families matter, so it is searched for these lines rather
than parsed as a whole.
"""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import aiohttp

from extproc.core.replica import EngineLoad

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.core.replica import Replica

RUNNING: Final = b"vllm:num_requests_running"
WAITING: Final = b"vllm:num_requests_waiting"
KV_USAGE: Final = b"vllm:kv_cache_usage_perc"
CACHE_CONFIG: Final = b"vllm:cache_config_info"
CACHE_QUERIES: Final = b"vllm:prefix_cache_queries_total"
CACHE_HITS: Final = b"vllm:prefix_cache_hits_total"

MAX_PAGE_BYTES: Final = 4 * 1024 * 1024
MAX_REQUESTS: Final = 1_000_000
MAX_TOKENS: Final = 10**12
"""Figures beyond these are lies or faults; a page that has one is not believed at all."""


class BadPage(ValueError):
    """The page is no engine's, or its figures can't be true."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Polling of the engines' metrics.

    enabled: off where replicas have none; the router's own counts are then all that is known of load.
    poll_s: between two looks. timeout_s: for each answer; a replica that is slower keeps its last figures, and after
        `routing.load_stale_s` they no longer count.
    path: of the metrics on each replica's port.
    """

    enabled: bool = True
    poll_s: float = 0.5
    timeout_s: float = 1.0
    path: str = "/metrics"

    def __post_init__(self) -> None:
        if not (self.poll_s > 0 and self.timeout_s > 0):
            raise ValueError("poll_s and timeout_s must be above 0")


def parse(page: bytes) -> EngineLoad:
    """One engine's load. Of several engines behind one port (data parallel) the sums. Raises BadPage."""
    running, waiting = _total(page, RUNNING, MAX_REQUESTS), _total(page, WAITING, MAX_REQUESTS)
    if running is None or waiting is None:
        raise BadPage("no vLLM metrics")
    usages = _values(page, KV_USAGE, 1.0)
    queries, hits = _total(page, CACHE_QUERIES, MAX_TOKENS), _total(page, CACHE_HITS, MAX_TOKENS)
    return EngineLoad(
        running=int(running),
        waiting=int(waiting),
        kv_usage=sum(usages) / len(usages) if usages else None,
        capacity_tokens=_capacity_tokens(page),
        prompt_tokens_computed=int(queries - hits) if queries is not None and hits is not None else None,
        prompt_tokens_cached=int(hits) if hits is not None else None,
    )


def _lines(page: bytes, name: bytes) -> list[bytes]:
    """The samples of one family: `name{labels} value`, but not of families whose names only begin so."""
    found, at = [], page.find(name)
    while at >= 0:
        end = page.find(b"\n", at)
        line = page[at : end if end >= 0 else len(page)]
        if (at == 0 or page[at - 1 : at] == b"\n") and line[len(name) : len(name) + 1] in (b"{", b" "):
            found.append(line)
        at = page.find(name, at + len(line))
    return found


def _values(page: bytes, name: bytes, at_most: float) -> list[float]:
    values = []
    for line in _lines(page, name):
        try:
            value = float(line[line.rfind(b"}") + 1 :].split()[0] if b"}" in line else line.split()[1])
        except (ValueError, IndexError):
            raise BadPage(f"{name.decode()}: not a number") from None
        if not (math.isfinite(value) and 0 <= value <= at_most):
            raise BadPage(f"{name.decode()}: {value} can't be")
        values.append(value)
    return values


def _total(page: bytes, name: bytes, at_most: float) -> float | None:
    values = _values(page, name, at_most)
    return sum(values) if values else None


def _capacity_tokens(page: bytes) -> int | None:
    total = 0
    for line in _lines(page, CACHE_CONFIG):
        size, count = (re.search(rb'[{,]%s="(\d{1,9})"' % label, line) for label in (b"block_size", b"num_gpu_blocks"))
        if size and count:
            total += int(size[1]) * int(count[1])
    return total or None


class EngineMetrics:
    """Polls until cancelled. Each replica is asked on its own, so that one that hangs delays no other."""

    def __init__(
        self,
        settings: LoadSettings,
        members: Callable[[], list[Replica]],
        report: Callable[[str, EngineLoad], None],
        failed: Callable[[str, str], None],
    ) -> None:
        self._settings = settings
        self._members = members
        self._report = report
        self._failed = failed
        self._asking: set[str] = set()

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as group:
            while True:
                for replica in self._members():
                    if replica.id not in self._asking:
                        self._asking.add(replica.id)
                        group.create_task(self._ask(session, replica))
                await asyncio.sleep(self._settings.poll_s)

    async def _ask(self, session: aiohttp.ClientSession, replica: Replica) -> None:
        try:
            async with session.get(f"http://{replica.endpoint}{self._settings.path}") as response:
                if response.status != 200:
                    raise BadPage(f"status {response.status}")
                page = await response.content.read(MAX_PAGE_BYTES)
                while chunk := await response.content.read(MAX_PAGE_BYTES):
                    page += chunk
                    if len(page) > MAX_PAGE_BYTES:
                        raise BadPage("too long")
            self._report(replica.id, parse(page))
        except (aiohttp.ClientError, TimeoutError, OSError, BadPage) as error:
            self._failed(replica.id, f"{type(error).__name__} {error}".rstrip())
        finally:
            self._asking.discard(replica.id)
