"""Prometheus' families as OTLP data."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from extproc.otlp_metrics import metrics_data


def converted(registry: CollectorRegistry) -> dict[str, Any]:
    data = metrics_data(registry.collect(), Resource({}), began_ns=1, now_ns=2)
    return {metric.name: metric.data for metric in data.resource_metrics[0].scope_metrics[0].metrics}


def test_each_kind_as_what_it_is() -> None:
    registry = CollectorRegistry()
    Counter("asked", "", ["by"], registry=registry).labels("a").inc(3)
    Gauge("open", "", registry=registry).set(-1.5)
    durations = Histogram("took", "", buckets=(1, 2), registry=registry)
    for seconds in (0.5, 1.5, 1.7, 9.0):
        durations.observe(seconds)
    data = converted(registry)
    (point,) = data["asked"].data_points
    assert (point.attributes, point.value, point.start_time_unix_nano, point.time_unix_nano) == ({"by": "a"}, 3.0, 1, 2)
    assert data["asked"].is_monotonic
    assert [point.value for point in data["open"].data_points] == [-1.5]
    (point,) = data["took"].data_points
    # Up to 1: one; up to 2: two more; above: one.
    assert (list(point.explicit_bounds), list(point.bucket_counts)) == ([1.0, 2.0], [1, 2, 1])
    assert (point.count, point.sum) == (4, 12.7)
