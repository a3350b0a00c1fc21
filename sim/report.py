"""Figures of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.fleet import Run


@dataclass(frozen=True, slots=True)
class Report:
    """One line of a comparison.

    hit_rate: prompt tokens found in a cache / all prompt tokens. ttft: time to first token, from sending.
    max_over_mean_load: requests in flight, averaged over time: the busiest replica over the mean.
    state_entries: what the policy remembered at the end.
    """

    policy: str
    requests: int
    hit_rate: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    e2e_mean_s: float
    max_over_mean_load: float
    state_entries: int
    preemptions: int
    duration_s: float


def report(run: Run) -> Report:
    visits = run.visits
    ttfts = sorted(visit.ttft_s for visit in visits)
    loads = [0.0] * len(run.engines)
    for visit in visits:
        loads[visit.replica] += visit.finished_s - visit.sent_s
    return Report(
        policy=run.policy,
        requests=len(visits),
        hit_rate=sum(visit.cached_tokens for visit in visits) / sum(visit.turn.prompt_tokens for visit in visits),
        ttft_mean_s=sum(ttfts) / len(ttfts),
        ttft_p50_s=quantile(ttfts, 0.5),
        ttft_p90_s=quantile(ttfts, 0.9),
        ttft_p99_s=quantile(ttfts, 0.99),
        e2e_mean_s=sum(visit.finished_s - visit.sent_s for visit in visits) / len(visits),
        max_over_mean_load=max(loads) * len(loads) / sum(loads),
        state_entries=run.state_entries,
        preemptions=sum(engine.preempted for engine in run.engines),
        duration_s=run.duration_s,
    )


def quantile(ascending: Sequence[float], share: float) -> float:
    """The nearest rank."""
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
