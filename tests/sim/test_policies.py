"""Peers' policies: each one's rule, on fleets small enough to see through."""

from __future__ import annotations

import pytest

from sim.engine import Engine, EngineModel
from sim.fleet import simulate
from sim.policies import POLICIES, make
from sim.turn import Turn, Visit
from sim.workload import Workload
from tests.sim.test_engine import BLOCK, turn

MODEL = EngineModel(prefill_tokens_per_s=8000, kv_tokens=400_000)


def fleet(size: int = 3) -> list[Engine]:
    return [Engine(MODEL, BLOCK) for _ in range(size)]


def warm(engine: Engine, prompt: Turn) -> None:
    """Leave a prompt in an engine's cache."""
    engine.submit(Visit(prompt, 0.0), 0.0)
    while engine.in_flight:
        engine.advance()


def load(engine: Engine, requests: int, tokens: int) -> None:
    for number in range(requests):
        engine.submit(Visit(turn(tokens, label=1000 + number), 0.0), 0.0)


def chosen(name: str, engines: list[Engine], asked: Turn) -> int:
    policy = make(name)
    policy.start(engines)
    policy.poll(0.0)
    return policy.choose(Visit(asked, 0.0), 0.0)


@pytest.mark.parametrize("name", ["scorers", "radix", "overlap_cost", "work_times_batch", "omniscient"])
def test_policies_that_know_caches_go_where_the_prompt_is(name: str) -> None:
    engines = fleet()
    warm(engines[2], turn(4096))
    assert chosen(name, engines, turn(4096)) == 2


@pytest.mark.parametrize(
    ("name", "goes_to"),
    [
        ("least_in_flight", 1),  # one request
        ("omniscient", 0),  # 900 tokens
        ("overlap_cost", 0),
        ("work_times_batch", 0),  # (900 + 100) x 31 = 31,000 < (30,000 + 100) x 2
    ],
)
def test_many_short_ones_or_a_long_one(name: str, goes_to: int) -> None:
    engines = fleet(2)
    load(engines[0], 30, 30)
    load(engines[1], 1, 30_000)
    assert chosen(name, engines, turn(100)) == goes_to


def test_round_robin_goes_round() -> None:
    policy = make("round_robin")
    policy.start(fleet())
    assert [policy.choose(Visit(turn(10), 0.0), 0.0) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_the_articles_ring_sees_only_the_last_heartbeat() -> None:
    engines = fleet()
    policy = make("seed_ring")
    policy.start(engines)
    policy.poll(0.0)
    home = policy.choose(Visit(turn(1000), 0.0), 0.0)
    load(engines[home], 17, 100)
    assert policy.choose(Visit(turn(1000), 0.1), 0.1) == home
    policy.poll(0.5)
    away = policy.choose(Visit(turn(1000), 0.6), 0.6)
    assert away != home and engines[away].in_flight == 0


def test_radix_goes_by_requests_only_while_loads_are_far_apart() -> None:
    engines = fleet(2)
    warm(engines[1], turn(4096))
    load(engines[1], 64, 10)
    assert chosen("radix", engines, turn(4096)) == 1
    load(engines[1], 1, 10)
    assert chosen("radix", engines, turn(4096)) == 0


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_plays_and_replays_alike(name: str) -> None:
    turns = [turn(500 + 100 * (number % 7), 20, number % 5, at_s=0.05 * number) for number in range(80)]
    workload = Workload("test", BLOCK, turns)
    runs = [simulate(workload, make(name), 4, MODEL) for _ in range(2)]
    outcomes = [[(v.replica, v.first_token_s, v.finished_s, v.cached_tokens) for v in run.visits] for run in runs]
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0]) == 80
    assert all(sent.turn.at_s == sent.sent_s < sent.first_token_s <= sent.finished_s for sent in runs[0].visits)
