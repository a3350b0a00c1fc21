"""Figures of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.fleet import Run
    from sim.turn import Visit


@dataclass(frozen=True, slots=True)
class Report:
    """One line of a comparison.

    hit_rate: prompt tokens found in a cache / all prompt tokens. ttft: time to first token, from sending.
    follow_up: the same of turns that follow another one; None in a workload that has none.
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
    follow_up_ttft_mean_s: float | None
    follow_up_ttft_p50_s: float | None
    preemptions: int
    duration_s: float


def report(run: Run, counts: Callable[[Visit], bool] = lambda _: True) -> Report:
    """The figures of those visits that count. Raises ValueError where none does."""
    visits = [visit for visit in run.visits if counts(visit)]
    if not visits:
        raise ValueError("a report needs at least one request")
    ttfts = sorted(visit.ttft_s for visit in visits)
    follow_ups = sorted(visit.ttft_s for visit in visits if visit.turn.number)
    loads = [0.0] * len(run.engines)
    for visit in visits:
        loads[visit.replica] += visit.finished_s - visit.sent_s
    return Report(
        policy=run.policy,
        requests=len(visits),
        hit_rate=sum(visit.cached_tokens for visit in visits) / sum(visit.turn.prompt_tokens for visit in visits),
        ttft_mean_s=mean(ttfts),
        ttft_p50_s=quantile(ttfts, 0.5),
        ttft_p90_s=quantile(ttfts, 0.9),
        ttft_p99_s=quantile(ttfts, 0.99),
        e2e_mean_s=sum(loads) / len(visits),
        max_over_mean_load=max(loads) * len(loads) / sum(loads),
        state_entries=run.state_entries,
        follow_up_ttft_mean_s=mean(follow_ups) if follow_ups else None,
        follow_up_ttft_p50_s=quantile(follow_ups, 0.5) if follow_ups else None,
        preemptions=sum(engine.preempted for engine in run.engines),
        duration_s=run.duration_s,
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def quantile(ascending: Sequence[float], share: float) -> float:
    """The nearest rank."""
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
