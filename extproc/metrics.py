"""What an operator watches, as Prometheus metrics.

Counts are kept as decisions happen; what the router knows is read only when somebody asks. Labels are reasons, feeds
and the replicas that are members at the moment, so their number is bounded.
"""

from __future__ import annotations

from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily as CounterFamily
from prometheus_client.core import GaugeMetricFamily as GaugeFamily

from extproc.core.decision import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from extproc.core.decision import Decision
    from extproc.core.features import Features
    from extproc.core.request import Request
    from extproc.core.router import Router
    from extproc.membership import Membership
    from extproc.picker import ResponseStart

DECISION_BUCKETS_S: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
"""A decision takes 0.1-0.2 ms with its features (`python -m bench.core`); above 5 ms something is wrong."""


class RouterMetrics:
    """A DecisionObserver, and the metrics of one router."""

    def __init__(self, router: Router, membership: Membership) -> None:
        self._router = router
        self._membership = membership
        self._decisions: Counter[Reason] = Counter()
        self._predicted_cached_tokens = 0.0
        self._actual_cached_tokens = 0
        self._actual_prompt_tokens = 0
        self._error_tokens = 0.0
        self._registry = CollectorRegistry()
        self._decision_s = Histogram(
            "extproc_decision_seconds",
            "Reading the request and choosing.",
            buckets=DECISION_BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(self)

    def text(self) -> bytes:
        """The page, in Prometheus' text format."""
        return generate_latest(self._registry)

    # --- DecisionObserver ---

    def decided(self, request: Request, features: Features, decision: Decision, took_s: float) -> None:
        self._decisions[decision.reason] += 1
        self._decision_s.observe(took_s)

    def response_started(self, decision: Decision, start: ResponseStart, since_decision_s: float) -> None:
        if start.prompt_tokens is None or start.cached_tokens is None:
            return
        predicted = min(decision.matched_bytes / self._router.bytes_per_token, start.prompt_tokens)
        self._predicted_cached_tokens += predicted
        self._actual_cached_tokens += start.cached_tokens
        self._actual_prompt_tokens += start.prompt_tokens
        self._error_tokens += abs(predicted - start.cached_tokens)

    def finished(self, decision: Decision, since_decision_s: float) -> None:
        pass

    # --- collector ---

    def collect(self) -> Iterator[Metric]:
        router, membership = self._router, self._membership
        decisions = CounterFamily("extproc_decisions", "Decisions by reason.", labels=("reason",))
        for reason in Reason:
            decisions.add_metric((reason.value,), self._decisions[reason])
        yield decisions
        for name, text, count in (
            (
                "extproc_cached_tokens_predicted",
                "Prompt tokens thought to be cached.",
                self._predicted_cached_tokens,
            ),
            ("extproc_cached_tokens", "Prompt tokens that engines found in their caches.", self._actual_cached_tokens),
            ("extproc_prompt_tokens", "Prompt tokens of answers that told their counts.", self._actual_prompt_tokens),
            ("extproc_prediction_error_tokens", "Sum of |predicted - found| cached tokens.", self._error_tokens),
            ("extproc_membership_failures", "Looks at the membership feed that failed.", membership.failures),
        ):
            yield CounterFamily(name, text, value=count)
        for name, text, value in (
            ("extproc_replicas", "Members, draining ones included.", len(router.loads)),
            ("extproc_membership_version", "Grows with every change.", router.membership_version),
            (
                "extproc_membership_stale",
                "1 while the feed is lost.",
                router.membership_stale,
            ),
            ("extproc_placement_entries", "Signatures in the placement memory.", len(router.memory)),
            ("extproc_placement_bytes", "What the placement memory is reckoned to take.", router.memory.size_bytes),
            ("extproc_open_leases", "Requests in flight through this router.", router.open_leases),
        ):
            yield GaugeFamily(name, text, value=float(value))
        if membership.last_read_s is not None:
            age_s = monotonic() - membership.last_read_s
            yield GaugeFamily("extproc_membership_age_seconds", "Since the feed last answered.", value=age_s)
        in_flight = GaugeFamily("extproc_in_flight", "Requests in flight.", labels=("replica", "router"))
        waiting = GaugeFamily("extproc_expected_work_tokens", "Work ahead of a new request.", labels=("replica",))
        for replica_id, load in router.loads.items():
            in_flight.add_metric((replica_id, "this"), load.in_flight)
            in_flight.add_metric((replica_id, "others"), load.others_in_flight)
            waiting.add_metric((replica_id,), load.work_tokens())
        yield in_flight
        yield waiting
