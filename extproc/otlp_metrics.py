"""The metrics page pushed to an OpenTelemetry collector, for those who do not scrape.

The families of `extproc.metrics` as they are, name by name, so that a dashboard finds them either way.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any, Final

import structlog
from opentelemetry.exporter.otlp.json.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.sdk.resources import Resource
    from prometheus_client.core import Metric as Family

DEFAULT_INTERVAL_MS: Final = 60_000
"""Of OTEL_METRIC_EXPORT_INTERVAL, by OpenTelemetry's specification."""

log = structlog.get_logger(__name__)


class OtlpMetrics:
    """Reads the families on the event loop, where they are true, and sends them from a thread.

    Where to: OTEL_EXPORTER_OTLP_ENDPOINT and its like. How often: OTEL_METRIC_EXPORT_INTERVAL, in ms.
    """

    def __init__(self, families: Callable[[], Iterable[Family]], resource: Resource) -> None:
        self._families = families
        self._resource = resource
        self._began_ns = time.time_ns()
        self._exporter = OTLPMetricExporter()
        self._interval_s = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", DEFAULT_INTERVAL_MS)) / 1000

    async def run(self) -> None:
        """Until cancelled. What a collector does not take is lost; the next push has the sums again."""
        lost = False
        while True:
            await asyncio.sleep(self._interval_s)
            data = metrics_data(self._families(), self._resource, self._began_ns, time.time_ns())
            result = await asyncio.to_thread(self._exporter.export, data)
            if (result is MetricExportResult.FAILURE) is not lost:
                lost = not lost
                log.warning("metrics are not taken by the collector" if lost else "metrics are taken again")


def metrics_data(families: Iterable[Family], resource: Resource, began_ns: int, now_ns: int) -> MetricsData:
    """Prometheus families as OTLP data. began_ns, now_ns: since when counters count, and until when, in Unix ns."""
    metrics = [_metric(family, began_ns, now_ns) for family in families]
    scope = ScopeMetrics(InstrumentationScope("extproc"), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metric(family: Family, began_ns: int, now_ns: int) -> Metric:
    data: Gauge | Histogram | Sum
    match family.type:
        case "histogram":
            points = [_histogram(family, began_ns, now_ns)]
            data = Histogram(points, AggregationTemporality.CUMULATIVE)
        case "counter":
            numbers = _numbers(family, "_total", began_ns, now_ns)
            data = Sum(numbers, AggregationTemporality.CUMULATIVE, is_monotonic=True)
        case _:
            data = Gauge(_numbers(family, "", began_ns, now_ns))
    return Metric(family.name, family.documentation, family.unit, data)


def _numbers(family: Family, suffix: str, began_ns: int, now_ns: int) -> list[NumberDataPoint]:
    return [
        NumberDataPoint(dict(sample.labels), began_ns, now_ns, sample.value)
        for sample in family.samples
        if sample.name == family.name + suffix
    ]


def _histogram(family: Family, began_ns: int, now_ns: int) -> HistogramDataPoint:
    """Of a family without labels. Prometheus' buckets add up, OTLP's do not; the last is that above all bounds."""
    below = [(sample.labels["le"], sample.value) for sample in family.samples if sample.name.endswith("_bucket")]
    total = next(sample.value for sample in family.samples if sample.name.endswith("_sum"))
    counts = [count for _, count in below]
    each = [int(count - before) for count, before in zip(counts, [0.0, *counts], strict=False)]
    bounds = [float(bound) for bound, _ in below if bound != "+Inf"]
    # Extremes are optional in OTLP, and not known here; the class just does not say so.
    unknown: Any = None
    return HistogramDataPoint({}, began_ns, now_ns, int(counts[-1]), total, each, bounds, unknown, unknown)
