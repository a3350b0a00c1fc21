"""`extproc simulate`, and traces."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from extproc.cli import main
from sim import trace

if TYPE_CHECKING:
    from pathlib import Path

KEYS = [
    *("policy", "requests", "hit_rate", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s"),
    *("e2e_mean_s", "max_over_mean_load", "state_entries"),
]


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 3000 * (n // 4), "input_length": 1500, "output_length": 10, "hash_ids": [0, n % 3 + 1, 100 + n]}
        for n in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def test_a_line_of_json_for_each_policy(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = "round_robin,expected_work"
    assert main(["simulate", "--trace", str(trace_file), "--replicas", "3", "--policies", policies, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["policy"] for line in lines] == policies.split(",")
    assert [list(line)[: len(KEYS)] for line in lines] == [KEYS] * 2
    assert all(line["requests"] == 40 and 0 < line["hit_rate"] < 1 for line in lines)


def test_the_same_seed_gives_the_same_figures_in_another_process(trace_file: Path) -> None:
    simulate = ["simulate", "--trace", str(trace_file), "--replicas", "3", "--json"]
    command = [sys.executable, "-c", "from extproc.cli import main; main()", *simulate]
    outputs = {subprocess.run([*command, "--seed", "5"], check=True, capture_output=True).stdout for _ in range(2)}
    assert len(outputs) == 1
    assert outputs != {subprocess.run([*command, "--seed", "6"], check=True, capture_output=True).stdout}


def test_a_table_and_a_picture(trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "runs.png"
    assert main(["simulate", "--trace", str(trace_file), "--plot", str(picture), "--policies", "omniscient"]) == 0
    assert "omniscient" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "says"),
    [("", "holds no requests"), ('{"timestamp": 0}', "line 1"), ("\nnonsense", "line 2")],
)
def test_a_trace_that_cannot_be_read(
    content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content, encoding="utf-8")
    assert main(["simulate", "--trace", str(path)]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--workload", "nobody_knows"],
        ["--workload", "dialogue", "--policies", "round_robin,luck"],
        ["--workload", "dialogue", "--replicas", "0"],
        ["--workload", "dialogue", "--speedup", "nan"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["simulate", *arguments])
    assert exit_.value.code == 2


def test_arrivals_of_one_timestamp_are_spread_up_to_the_next(trace_file: Path) -> None:
    workload = trace.read(trace_file, speedup=2.0, seed=1)
    times = [turn.at_s for turn in workload.turns]
    assert times == sorted(times)
    for number in range(9):  # bins of 3 s at twice the speed; the last has no end
        in_bin = [at_s for at_s in times if 1.5 * number <= at_s < 1.5 * (number + 1)]
        assert len(in_bin) == 4 and len(set(in_bin)) == 4
    assert len({turn.at_s for turn in trace.read(trace_file, seed=2).turns} & set(times)) < 10
