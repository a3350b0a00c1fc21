"""Requests that are written for a workload are to routers and engines what its turns are to the simulator."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import pytest

from extproc.core.features import Features, FeatureSettings, extract
from extproc.core.request import Request
from serve_app.engine.cache import BLOCK_TOKENS, block_hashes
from serve_app.engine.prompt import chat_tokens, completion_tokens, token_count
from sim import trace
from sim.generate import WORKLOADS, Scale
from sim.script import Line, as_workload, write

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MARKER_TOKENS = 4
"""What a chat template puts around a message, at most."""


@pytest.fixture(params=["dialogue", "tenants", "agents", "single_turn", "trace"])
def lines(request: pytest.FixtureRequest, tmp_path: Path) -> list[Line]:
    if request.param != "trace":
        workload = WORKLOADS[request.param](Scale(replicas=4, requests=60))
    else:
        rows = [
            {"timestamp": n, "input_length": 1300 + n, "output_length": 9, "hash_ids": [0, n % 3, 100 + n]}
            for n in range(12)
        ]
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        workload = trace.read(path)
    return [line for lines in write(workload, 40) for line in lines]


def features(line: Line) -> Features:
    body = json.dumps(line.body("m", "salt")).encode()
    return extract(Request("POST", line.path, line.headers("salt"), body), FeatureSettings())


def tokens(line: Line, salt: str = "salt") -> bytes:
    body = line.body("m", salt)
    return chat_tokens(body) if "messages" in body else completion_tokens(body)[0]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading blocks agree."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_a_router_finds_what_the_simulated_one_is_shown(lines: list[Line]) -> None:
    shown, found = [line.turn.features for line in lines], [features(line) for line in lines]
    for one, other in zip(shown, found, strict=True):
        assert one.api is other.api
        assert one.conversation_source == other.conversation_source
        assert (one.system_rung is None) is (other.system_rung is None)
    for (a, real_a), (b, real_b) in itertools.combinations(zip(shown, found, strict=True), 2):
        assert (a.conversation_key == b.conversation_key) is (real_a.conversation_key == real_b.conversation_key)
        if a.system_rung and b.system_rung and real_a.system_rung and real_b.system_rung:
            same = real_a.system_rung.signature == real_b.system_rung.signature
            assert (a.system_rung.signature == b.system_rung.signature) is same


def test_an_engine_finds_as_much_as_the_simulated_one(lines: list[Line]) -> None:
    size = lines[0].block_tokens
    hashed = [(line, block_hashes(tokens(line), 0)) for line in lines]
    for (one, hashes), (other, other_hashes) in itertools.combinations(hashed, 2):
        expected = common(one.turn.blocks, other.turn.blocks) * size
        # Markers come on top, and real blocks are smaller than the workload's.
        markers = MARKER_TOKENS * (len(one.ends) + 1)
        found = common(hashes, other_hashes) * BLOCK_TOKENS
        assert expected - BLOCK_TOKENS - markers <= found < expected + size + markers


def test_prompts_and_answers_have_their_lengths(lines: list[Line]) -> None:
    for line in lines:
        extra = token_count(tokens(line)) - line.turn.prompt_tokens
        assert 0 <= extra <= MARKER_TOKENS * (len(line.ends) + 1)
        assert line.body("m", "salt")["max_tokens"] == line.turn.output_tokens


def test_another_salt_shares_nothing(lines: list[Line]) -> None:
    for line in lines:
        one, other = (block_hashes(tokens(line, salt), 0) for salt in ("a", "b"))
        assert one[:1] != other[:1] or not one
    named = [line for line in lines if line.headers("a")]
    assert all(line.headers("a") != line.headers("b") for line in named)


def test_limits_and_speed() -> None:
    workload = WORKLOADS["dialogue"](Scale(replicas=4))
    script = write(workload, 12, speedup=4.0, max_tokens=3)
    assert [len(lines) for lines in script] == [5, 5, 2]
    played = as_workload("played", script)
    assert len(played) == 12
    head, original = played.turns[0], workload.turns[0]
    assert head.then is not None and original.then is not None
    assert (head.at_s, head.then.at_s) == (original.at_s / 4, original.then.at_s / 4)
    assert {line.turn.output_tokens for lines in script for line in lines} == {3}
