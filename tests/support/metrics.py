"""Reading Prometheus text."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def figure(text: str, name: str, **labels: str) -> float:
    """The sum of all samples of `name` that carry `labels`. Raises KeyError where there is none."""
    values = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    if not values:
        raise KeyError(f"{name}{labels}")
    return sum(values)
