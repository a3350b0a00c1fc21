"""What routing is to achieve, on workloads small enough for a test; docs/results.md has the full ones."""

from __future__ import annotations

import pytest

from extproc.core.settings import RouterSettings
from sim.bound import bound
from sim.engine import EngineModel
from sim.fleet import simulate
from sim.generate import WORKLOADS, Scale
from sim.policies import Conditions, make
from sim.report import Report, report

MODEL = EngineModel(prefill_tokens_per_s=8000, kv_tokens=400_000)


def play(source: str, policy: str, scale: Scale, *, signal: bool = True) -> Report:
    run = simulate(WORKLOADS[source](scale), make(policy, Conditions(first_token_signal=signal)), scale.replicas, MODEL)
    return report(run)


@pytest.mark.parametrize("signal", [True, False])
def test_the_articles_scenario(signal: bool) -> None:
    """Later turns wait half as long as under round robin, or less; most of what can hit does."""
    scale = Scale(replicas=8)
    ours, theirs = play("dialogue", "expected_work", scale, signal=signal), play("dialogue", "round_robin", scale)
    assert ours.follow_up_ttft_mean_s is not None and theirs.follow_up_ttft_mean_s is not None
    assert ours.follow_up_ttft_p50_s is not None and theirs.follow_up_ttft_p50_s is not None
    assert ours.follow_up_ttft_mean_s <= 0.5 * theirs.follow_up_ttft_mean_s
    assert ours.follow_up_ttft_p50_s <= 0.5 * theirs.follow_up_ttft_p50_s
    assert ours.hit_rate >= 0.85 * bound(WORKLOADS["dialogue"](scale), 8, MODEL).hit_rate


@pytest.mark.parametrize("source", ["tenants", "few_tenants"])
def test_shared_system_prompts(source: str) -> None:
    scale = Scale(replicas=16)  # in full: in the beginning each prompt's first copies weigh too much
    ours, best = play(source, "expected_work", scale), play(source, "omniscient", scale)
    assert ours.ttft_mean_s <= 1.10 * best.ttft_mean_s


def test_where_nothing_is_shared_nothing_gets_worse() -> None:
    scale = Scale(replicas=8, requests=3000)
    ours, least = play("single_turn", "expected_work", scale), play("single_turn", "least_in_flight", scale)
    assert ours.ttft_mean_s <= least.ttft_mean_s
    assert ours.ttft_p99_s <= least.ttft_p99_s


def test_one_hot_prefix_spreads_under_load() -> None:
    ours = play("hot_prefix", "expected_work", Scale(replicas=8, requests=4000, speedup=2))
    assert ours.max_over_mean_load <= 1.2


@pytest.mark.parametrize("assumed_tokens_per_s", [2000.0, 32_000.0])
def test_a_wrong_idea_of_speed_is_corrected_by_the_engines_queues(assumed_tokens_per_s: float) -> None:
    """Without any first-token signal, at a load at which prompts queue."""
    scale = Scale(replicas=8, requests=4000)
    workload = WORKLOADS["single_turn"](scale)
    settings = RouterSettings(prefill_tokens_per_s=assumed_tokens_per_s)
    policy = make("expected_work", Conditions(settings, first_token_signal=False))
    ours = report(simulate(workload, policy, 8, MODEL))
    assert ours.ttft_mean_s <= 1.25 * play("single_turn", "expected_work", scale).ttft_mean_s


def test_routers_that_share_nothing_still_agree_where_a_conversation_lives() -> None:
    """Each meets a quarter of a conversation's turns; the ring is all that they have in common."""
    scale = Scale(replicas=8)
    policy = make("expected_work", Conditions(routers=4))
    four = report(simulate(WORKLOADS["dialogue"](scale), policy, 8, MODEL))
    assert four.follow_up_ttft_mean_s is not None
    follow_up_s = play("dialogue", "round_robin", scale).follow_up_ttft_mean_s
    assert follow_up_s is not None and four.follow_up_ttft_mean_s <= 0.6 * follow_up_s
