"""Alerts and dashboard, read by a PromQL parser: they ask for metrics and labels that the router really has.

What the alerts do is tried by Prometheus' own promtool (`make alerts-check`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import promql_parser
import pytest
import yaml
from promql_parser import AggregateExpr, BinaryExpr, Call, MatchOp, MatrixSelector, ParenExpr, VectorSelector

from extproc.core.decision import Reason
from tests.telemetry.test_metrics import documented

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent.parent
GROUPS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text(encoding="utf-8"))["groups"]
CASES = yaml.safe_load((ROOT / "deploy/prometheus/alerts_test.yml").read_text(encoding="utf-8"))["tests"]
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboard.json").read_text(encoding="utf-8"))
SCRAPE = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]

ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
QUERIES = {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
}
PROMETHEUS_OWN = {"up": {"job", "instance"}}
VALUES = {
    "reason": set(Reason),
    "state": {"ready", "saturated", "draining"},
    "job": {each["job_name"] for each in SCRAPE},
}


def series() -> dict[str, set[str]]:
    """What may be asked for: each series' name and its labels."""
    found = {name: labels | {"job", "instance"} for (name, _), labels in documented().items()}
    for name, kind in documented():
        if kind == "histogram":
            labels = found.pop(name)
            found |= {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}
    return found | PROMETHEUS_OWN


def selectors(node: Any) -> Iterator[VectorSelector]:
    """All series that an expression asks for."""
    match node:
        case VectorSelector():
            yield node
        case MatrixSelector():
            yield node.vector_selector
        case BinaryExpr():
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case AggregateExpr() | ParenExpr():
            yield from selectors(node.expr)
        case Call():
            for argument in node.args:
                yield from selectors(argument)


def parsed(expression: str) -> Any:
    """Raises ValueError where it is no PromQL. Grafana's variables get a value first."""
    return promql_parser.parse(expression.replace("$__rate_interval", "1m").replace("$instance", ".*"))


@pytest.mark.parametrize("expression", [*(rule["expr"] for rule in ALERTS.values()), *QUERIES.values()])
def test_what_is_asked_for_exists(expression: str) -> None:
    asked = list(selectors(parsed(expression)))
    assert asked
    for selector in asked:
        labels = series()[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels
            if matcher.name in VALUES:
                wanted = {matcher.value} if matcher.op == MatchOp.Equal else set(matcher.value.split("|"))
                assert wanted <= VALUES[matcher.name]


def test_the_parser_is_one() -> None:
    with pytest.raises(ValueError, match="parenthesis"):
        parsed("sum by (le (up)")
    assert [each.name for each in selectors(parsed("sum(rate(a[5m])) / on (x) (b offset 1h) > 1"))] == ["a", "b"]


def test_each_alert_has_a_reason_a_case_and_a_runbook() -> None:
    text = (ROOT / "deploy/prometheus/alerts.yml").read_text(encoding="utf-8")
    reasons = re.findall(r"(?:^  # .+\n)+  - alert: (\w+)$", text, re.M)
    fired = {case["alertname"] for test in CASES for case in test.get("alert_rule_test", ()) if case.get("exp_alerts")}
    runbooks = {f"docs/operations.md#{heading.lower()}": heading for heading in headings()}
    assert set(reasons) == fired == set(ALERTS)
    assert {runbooks[rule["annotations"]["runbook"]] for rule in ALERTS.values()} == set(ALERTS)


def headings() -> list[str]:
    return re.findall(r"^#+ (\w+)$", (ROOT / "docs/operations.md").read_text(encoding="utf-8"), re.M)


def test_panels_do_not_lie_on_each_other() -> None:
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
