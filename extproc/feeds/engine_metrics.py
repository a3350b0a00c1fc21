"""Load as the engines themselves tell it: vLLM's /metrics, every half second.

Names as of vLLM 0.32. The whole page is over 100 KB, of which six families matter. Asked as `/metrics/?name[]=...`
vLLM renders only these: its prometheus_client application answers there, while `/metrics` without the slash belongs
to an instrumentator that knows no such filter. That saves the router four fifths of a poll and the engine nearly all
of it. An engine that does not know the narrow question is asked for the whole page, which is then searched for the
lines that matter: 0.2 ms, where a full parse by prometheus_client takes 29 ms.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

import structlog

from extproc.core.replica import EngineLoad
from extproc.feeds.rounds import Rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from extproc.core.replica import Replica
    from extproc.feeds.connection import Connection

RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"
KV_USAGE: Final = "vllm:kv_cache_usage_perc"
CACHE_CONFIG: Final = "vllm:cache_config_info"
CACHE_QUERIES: Final = "vllm:prefix_cache_queries_total"
CACHE_HITS: Final = "vllm:prefix_cache_hits_total"

MAX_REQUESTS: Final = 1_000_000
MAX_TOKENS: Final = 10**15
"""Figures beyond these are lies or faults; a page that has one is not believed at all."""

log = structlog.get_logger(__name__)


class BadPage(ValueError):
    """The page is no engine's, or its figures can't be true."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Polling of the engines' metrics.

    enabled: off where replicas have none; the router's own counts are then all that is known of load.
    poll_s: between two looks at a replica. timeout_s: for each answer; a replica that is slower keeps its last
        figures, and after `routing.load_stale_s` they no longer count.
    path: of the metrics on each replica's port.
    """

    enabled: bool = True
    poll_s: float = 0.5
    timeout_s: float = 1.0
    path: str = "/metrics"

    def __post_init__(self) -> None:
        if not (self.poll_s > 0 and self.timeout_s > 0):
            raise ValueError("poll_s and timeout_s must be above 0")
        if not self.path.startswith("/"):
            raise ValueError('path must begin with "/"')

    @property
    def questions(self) -> tuple[str, str]:
        """The narrow one and the whole page."""
        names = (RUNNING, WAITING, KV_USAGE, CACHE_CONFIG, CACHE_QUERIES, CACHE_HITS)
        return f"{self.path}/?{'&'.join(f'name[]={name}' for name in names)}", self.path


class EngineMetrics:
    """Polls all members until cancelled.

    report: called with a replica's id and its figures.
    """

    def __init__(
        self,
        settings: LoadSettings,
        members: Callable[[], Iterable[Replica]],
        report: Callable[[str, EngineLoad], None],
    ) -> None:
        self._questions = settings.questions
        self._members = members
        self._report = report
        self._asked_whole: WeakSet[Connection] = WeakSet()
        self._lost: set[str] = set()
        self._rounds = Rounds(settings.poll_s, settings.timeout_s, members, self._ask, self._failed)

    @property
    def failures(self) -> int:
        """Polls that failed, so far."""
        return self._rounds.failures

    async def run(self) -> None:
        await self._rounds.run()

    async def _ask(self, replica: Replica, connection: Connection) -> None:
        whole = connection in self._asked_whole
        page = await connection.get(replica.route_prefix + self._questions[whole])
        try:
            if page.status != 200:
                raise BadPage(f"status {page.status}")
            load = parse(page.body)
        except BadPage:
            if not whole:
                self._asked_whole.add(connection)
                return  # perhaps only the question was not understood
            self._asked_whole.discard(connection)
            raise
        self._report(replica.id, load)
        if replica.id in self._lost:
            self._lost.discard(replica.id)
            log.info("engine metrics found again", replica=replica.id)

    def _failed(self, replica: Replica, error: Exception) -> None:
        if replica.id not in self._lost:
            self._lost = {member.id for member in self._members()} & self._lost | {replica.id}
            log.warning("engine metrics lost", replica=replica.id, error=f"{type(error).__name__} {error}".rstrip())


def parse(page: bytes) -> EngineLoad:
    """One engine's load. Of several engines behind one port (data parallel) the sums. Raises BadPage."""
    running, waiting = _total(page, RUNNING, MAX_REQUESTS), _total(page, WAITING, MAX_REQUESTS)
    if running is None or waiting is None:
        raise BadPage("no vLLM metrics")
    usages = _values(page, KV_USAGE, 1.0)
    queries, hits = _total(page, CACHE_QUERIES, MAX_TOKENS), _total(page, CACHE_HITS, MAX_TOKENS)
    if queries is not None and hits is not None and hits > queries:
        raise BadPage("more prefix cache hits than queries")
    return EngineLoad(
        running=int(running),
        waiting=int(waiting),
        kv_usage=sum(usages) / len(usages) if usages else None,
        capacity_tokens=_capacity_tokens(page),
        prompt_tokens_computed=int(queries - hits) if queries is not None and hits is not None else None,
        prompt_tokens_cached=int(hits) if hits is not None else None,
    )


def _lines(page: bytes, name: str) -> list[bytes]:
    """The samples of one family: `name{labels} value`, but not of families whose names only begin so."""
    wanted = name.encode()
    found, at = [], page.find(wanted)
    while at >= 0:
        end = page.find(b"\n", at)
        line = page[at : end if end >= 0 else len(page)]
        if (at == 0 or page[at - 1 : at] == b"\n") and line[len(wanted) : len(wanted) + 1] in (b"{", b" "):
            found.append(line)
        at = page.find(wanted, at + len(line))
    return found


def _values(page: bytes, name: str, at_most: float) -> list[float]:
    values = []
    for line in _lines(page, name):
        try:
            value = float(line[line.rfind(b"}") + 1 :].split()[0] if b"}" in line else line.split()[1])
        except (ValueError, IndexError):
            raise BadPage(f"{name}: not a number") from None
        if not (math.isfinite(value) and 0 <= value <= at_most):
            raise BadPage(f"{name}: {value} can't be")
        values.append(value)
    return values


def _total(page: bytes, name: str, at_most: float) -> float | None:
    values = _values(page, name, at_most)
    return sum(values) if values else None


def _capacity_tokens(page: bytes) -> int | None:
    """All engines' caches together.

    `kv_cache_size_tokens` is each engine's own, and right for hybrid models, whose requests take blocks of several
    groups. Where it is not told, blocks times their size stand in: of all engines together, on the line of each
    (vllm/v1/engine/core_client.py sums `num_gpu_blocks` and says so).
    """
    lines = _lines(page, CACHE_CONFIG)
    own = [size for line in lines if (size := _label(line, b"kv_cache_size_tokens"))]
    products = [_label(line, b"block_size") * _label(line, b"num_gpu_blocks") for line in lines]
    total = sum(own) or max(products, default=0)
    if total > MAX_TOKENS:
        raise BadPage(f"{CACHE_CONFIG}: a cache of {total} tokens can't be")
    return total or None


def _label(line: bytes, name: bytes) -> int:
    """A label's whole number; 0 where it has none."""
    found = re.search(rb'[{,]%s="(\d{1,18})"' % name, line)
    return int(found[1]) if found else 0
