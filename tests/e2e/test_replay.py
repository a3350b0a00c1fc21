"""What the simulator predicts is what clients of the real stack see."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from extproc.cli import main

if TYPE_CHECKING:
    from demo.stack import Stack

pytestmark = pytest.mark.e2e


def test_a_dialogue_comes_out_as_the_simulator_predicts(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    # 24 users, five turns each, thinking 2 s between them; 4,000 tokens of history.
    words = "replay --workload dialogue --requests 120 --speedup 10 --max-tokens 4 --json"
    assert main([*words.split(), "--replicas", str(stack.app.num_replicas), "--url", stack.url]) == 0
    lines: dict[str, dict[str, Any]] = {}
    for line in map(json.loads, capsys.readouterr().out.splitlines()):
        lines[line["way"]] = line
    assert [(line["requests"], line["errors"]) for line in lines.values()] == [(120, 0)] * 2
    before, after = lines["round_robin"]["measured"], lines["affinity"]["measured"]
    assert after["hit_rate"] > before["hit_rate"]
    assert after["ttft_mean_s"] < before["ttft_mean_s"]
    print(json.dumps(lines))
