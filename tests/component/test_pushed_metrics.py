"""Metrics that are pushed: the real process, and a collector that really takes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from aiohttp import web

from demo.ports import free_port
from demo.wait import until
from tests.component.serving import Serving

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_collector_gets_what_the_page_shows(tmp_path: Path) -> None:
    port, pushed = free_port(), []

    async def take(request: web.Request) -> web.Response:
        pushed.append(json.loads(await request.read()))
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/v1/metrics", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_METRIC_EXPORT_INTERVAL": "200"}
    try:
        with Serving(tmp_path, {"telemetry": {"push_metrics": True, "service_name": "front"}}, env=env) as router:
            router.fleet("10.0.0.1:8000", "10.0.0.2:8000")

            async def told() -> bool:
                return bool(pushed) and _points(pushed[-1]).get("extproc_replicas", {}).get("ready") == 2

            await until(told, "the collector knows of two replicas")
    finally:
        await runner.cleanup()
    resource = pushed[-1]["resourceMetrics"][0]["resource"]["attributes"]
    assert {"key": "service.name", "value": {"stringValue": "front"}} in resource
    metrics = {each["name"]: each for each in pushed[-1]["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]}
    decisions = metrics["extproc_decisions"]["sum"]
    assert decisions["isMonotonic"]
    assert {attribute["key"] for attribute in decisions["dataPoints"][0]["attributes"]} == {"policy", "reason"}
    durations = metrics["extproc_decision_seconds"]["histogram"]["dataPoints"][0]
    assert "min" not in durations
    assert len(durations["bucketCounts"]) == len(durations["explicitBounds"]) + 1


def _points(push: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Gauges with one label: metric -> label's value -> value."""
    metrics = push["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    return {
        metric["name"]: {
            point["attributes"][0]["value"]["stringValue"]: float(point.get("asDouble", point.get("asInt")))
            for point in metric["gauge"]["dataPoints"]
            if point.get("attributes")
        }
        for metric in metrics
        if "gauge" in metric
    }
