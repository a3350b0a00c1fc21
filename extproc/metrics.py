"""What an operator watches, as Prometheus metrics (docs/telemetry.md lists them).

Counts are kept as decisions happen; what the router knows is read only when somebody asks. Labels are reasons,
policies, feeds and, in fleets that are not large, the replicas that are members at the moment: nothing that a client
can choose.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from time import monotonic
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily as CounterFamily
from prometheus_client.core import GaugeMetricFamily as GaugeFamily
from prometheus_client.core import HistogramMetricFamily as HistogramFamily
from prometheus_client.utils import floatToGoString

from extproc.build import COMPILED
from extproc.core.decision import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

    from extproc.core.decision import Decision
    from extproc.core.features import Features
    from extproc.core.load import ReplicaLoad
    from extproc.core.request import Request
    from extproc.core.router import Router
    from extproc.eds import EndpointDiscovery
    from extproc.feeds.engine_metrics import EngineMetrics
    from extproc.membership import Membership
    from extproc.picker import ResponseStart

DECISION_BUCKETS_S: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
"""A decision takes 0.1-0.2 ms with its features (`python -m bench.core`); above 5 ms something is wrong."""
FIRST_TOKEN_BUCKETS_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""From a short prompt that is cached to one of 100,000 tokens that is not, behind a queue."""
MAX_REPLICA_SERIES: Final = 256
"""Up to so many members each has series of its own; a larger fleet shows its sums and extremes. The page is made
between two decisions: 256 members take 6 ms, 1,000 would take 28."""


class Durations:
    """A histogram that is added to without locks, at a tenth of the cost: all is counted on one event loop.

    bounds_s: upper bounds of the buckets, ascending.
    """

    def __init__(self, name: str, text: str, bounds_s: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        self._counts[bisect_left(self._bounds_s, duration_s)] += 1
        self._sum_s += duration_s

    def family(self) -> Metric:
        bounds = [*map(floatToGoString, self._bounds_s), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        return HistogramFamily(self._name, self._text, buckets, self._sum_s)


class RouterMetrics:
    """A DecisionObserver, and the metrics of one router.

    engines: None where their metrics are not polled. stream_errors: ext_proc streams that broke off, by kind.
    """

    def __init__(
        self,
        router: Router,
        membership: Membership,
        endpoints: EndpointDiscovery,
        engines: EngineMetrics | None,
        stream_errors: Mapping[str, int],
    ) -> None:
        self._router = router
        self._membership = membership
        self._endpoints = endpoints
        self._engines = engines
        self._stream_errors = stream_errors
        self._decisions: Counter[tuple[str, Reason]] = Counter()
        self._by_headers = 0
        self._expected_cached_tokens = 0.0
        self._cached_tokens = 0
        self._prompt_tokens = 0
        self._error_tokens = 0.0
        self._decision_s = Durations(
            "extproc_decision_seconds", "Reading the request and choosing.", DECISION_BUCKETS_S
        )
        self._first_token_s = Durations(
            "extproc_first_token_seconds",
            "From the decision to the first token, where the answer's headers tell it.",
            FIRST_TOKEN_BUCKETS_S,
        )
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The page, in Prometheus' text format."""
        return generate_latest(self._registry)

    def families(self) -> Iterable[Metric]:
        """The same, one by one."""
        return self._registry.collect()

    # --- DecisionObserver ---

    def decided(self, request: Request, features: Features, decision: Decision, took_s: float) -> None:
        self._decisions[self._router.settings.policy, decision.reason] += 1
        self._by_headers += features.by_headers
        self._decision_s.observe(took_s)

    def response_started(self, decision: Decision, start: ResponseStart, since_decision_s: float) -> None:
        if start.first_token:
            self._first_token_s.observe(since_decision_s)
        if start.prompt_tokens is None or start.cached_tokens is None:
            return
        expected = min(decision.matched_bytes / self._router.bytes_per_token, start.prompt_tokens)
        self._expected_cached_tokens += expected
        self._cached_tokens += start.cached_tokens
        self._prompt_tokens += start.prompt_tokens
        self._error_tokens += abs(expected - start.cached_tokens)

    def finished(self, decision: Decision, since_decision_s: float) -> None:
        pass

    # --- collector ---

    def collect(self) -> Iterator[Metric]:
        yield self._decided()
        yield self._decision_s.family()
        yield self._first_token_s.family()
        yield from self._counters()
        yield from self._gauges()
        yield from _fleet(self._router)
        if len(self._router.loads) <= MAX_REPLICA_SERIES:
            yield from _each_replica(self._router.loads)

    def _decided(self) -> Metric:
        family = CounterFamily("extproc_decisions", "Decisions by reason and policy.", labels=("policy", "reason"))
        policies = {self._router.settings.policy.value, *(policy for policy, _ in self._decisions)}
        for policy in sorted(policies):
            for reason in Reason:
                family.add_metric((policy, reason), self._decisions[policy, reason])
        return family

    def _counters(self) -> Iterator[Metric]:
        for name, text, count in (
            ("extproc_decisions_by_headers", "Decisions whose request's body was not asked for.", self._by_headers),
            (
                "extproc_cached_tokens_expected",
                "Prompt tokens thought to be cached on the chosen replica.",
                self._expected_cached_tokens,
            ),
            ("extproc_cached_tokens", "Prompt tokens that engines found in their caches.", self._cached_tokens),
            ("extproc_prompt_tokens", "Prompt tokens of answers that told their counts.", self._prompt_tokens),
            ("extproc_prediction_error_tokens", "Sum of |expected - found| cached tokens.", self._error_tokens),
            ("extproc_membership_failures", "Looks at the membership feed that failed.", self._membership.failures),
        ):
            yield CounterFamily(name, text, value=count)
        if self._engines is not None:
            yield CounterFamily(
                "extproc_load_failures", "Polls of an engine's metrics that failed.", value=self._engines.failures
            )
        errors = CounterFamily("extproc_stream_errors", "ext_proc streams that broke off, by kind.", labels=("kind",))
        for kind, count in self._stream_errors.items():
            errors.add_metric((kind,), count)
        yield errors

    def _gauges(self) -> Iterator[Metric]:
        router, now_s = self._router, monotonic()
        loads = router.loads.values()
        values = {
            "extproc_membership_version": ("Grows with every change.", router.membership_version),
            "extproc_membership_stale": ("1 while the feed is lost.", router.membership_stale),
            "extproc_envoys": ("Data planes that follow the endpoints.", len(self._endpoints.subscribers)),
            "extproc_placement_entries": ("Signatures in the placement memory.", len(router.memory)),
            "extproc_placement_bytes": ("What the placement memory is reckoned to take.", router.memory.size_bytes),
            "extproc_open_leases": ("Requests in flight through this router.", router.open_leases),
            "extproc_bytes_per_token": ("Learned from the engines' own counts.", router.bytes_per_token),
        }
        if self._membership.last_read_s is not None:
            age_s = now_s - self._membership.last_read_s
            values["extproc_membership_age_seconds"] = ("Since the feed last answered.", age_s)
        if ages_s := [now_s - load.engine_s for load in loads if load.engine is not None]:
            values["extproc_load_age_seconds"] = ("Since the engine heard longest ago was heard.", max(ages_s))
        for name, (text, value) in values.items():
            yield GaugeFamily(name, text, value=float(value))
        build = GaugeFamily("extproc_build_info", "1. Labels tell the build.", labels=("compiled", "python"))
        build.add_metric((str(COMPILED).lower(), platform.python_version()), 1)
        yield build


def _fleet(router: Router) -> Iterator[Metric]:
    """What the fleet is doing, whatever its size."""
    states = Counter({"ready": 0, "saturated": 0, "draining": 0})
    for load in router.loads.values():
        saturated = load.total_in_flight > router.settings.saturation_in_flight
        states["draining" if load.replica.draining else "saturated" if saturated else "ready"] += 1
    members = GaugeFamily("extproc_replicas", "Members by state; one that is unwell is draining.", labels=("state",))
    for state, count in states.items():
        members.add_metric((state,), count)
    yield members
    loads = router.loads.values()
    for name, text, most in (
        (
            "extproc_in_flight_max",
            "Requests in flight on the fullest replica.",
            [each.total_in_flight for each in loads],
        ),
        ("extproc_expected_work_max_tokens", "Work on the busiest replica.", [each.work_tokens() for each in loads]),
    ):
        yield GaugeFamily(name, text, value=max(most, default=0))


def _each_replica(loads: Mapping[str, ReplicaLoad]) -> Iterator[Metric]:
    in_flight = GaugeFamily("extproc_in_flight", "Requests in flight.", labels=("replica", "router"))
    waiting = GaugeFamily("extproc_expected_work_tokens", "Work ahead of a new request.", labels=("replica",))
    for replica_id, load in loads.items():
        in_flight.add_metric((replica_id, "this"), load.in_flight)
        in_flight.add_metric((replica_id, "others"), load.others_in_flight)
        waiting.add_metric((replica_id,), load.work_tokens())
    yield in_flight
    yield waiting
