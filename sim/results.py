"""docs/results.md with all its tables and pictures, from one command: `python -m sim.results --trace FILE`."""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from extproc.core.settings import RouterSettings
from sim import plot, trace
from sim.ablations import ABLATIONS
from sim.bound import bound
from sim.engine import EngineModel
from sim.fleet import POLL_S, Run, simulate
from sim.generate import REQUESTS, WORKLOADS, Scale
from sim.policies import POLICIES, Conditions, make
from sim.report import Report, report

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sim.policies.policy import Policy
    from sim.workload import Workload

MODEL: Final = EngineModel(prefill_tokens_per_s=8000, kv_tokens=400_000)
"""Round figures near those of serve_app.engine: a 4,096-token miss takes 530 ms."""
PICTURED: Final = ("round_robin", "least_in_flight", "scorers", "omniscient", "expected_work")


@dataclass(frozen=True, slots=True)
class Scenario:
    """source: a workload's name, or "trace"."""

    source: str
    replicas: int = 16
    speedup: float = 1.0
    requests: int = REQUESTS

    def workload(self, trace_file: Path) -> Workload:
        if self.source == "trace":
            return trace.read(trace_file, self.speedup)
        return WORKLOADS[self.source](Scale(self.replicas, self.requests, self.speedup))

    @property
    def command(self) -> str:
        source = "--trace FILE" if self.source == "trace" else f"--workload {self.source}"
        speedup = f" --speedup {self.speedup:g}" if self.speedup != 1 else ""
        model = f"--prefill-tokens-per-s {MODEL.prefill_tokens_per_s:g} --kv-tokens {MODEL.kv_tokens}"
        return f"extproc simulate {source} --replicas {self.replicas}{speedup} {model}"


@dataclass(frozen=True, slots=True)
class Job:
    """One run. variant: a key of ABLATIONS, instead of a policy's name."""

    scenario: Scenario
    policy: str = "expected_work"
    variant: str | None = None
    poll_s: float = POLL_S
    routers: int = 1
    first_token_signal: bool = True
    assumed_tokens_per_s: float | None = None
    """What our router takes a replica's speed to be, until it knows better."""

    def make(self) -> Policy:
        if self.variant is not None:
            return ABLATIONS[self.variant]()
        settings = RouterSettings()
        if self.assumed_tokens_per_s is not None:
            settings = RouterSettings(prefill_tokens_per_s=self.assumed_tokens_per_s)
        return make(self.policy, Conditions(settings, self.routers, self.first_token_signal))

    def play(self, trace_file: Path) -> Run:
        return simulate(_workload(self.scenario, trace_file), self.make(), self.scenario.replicas, MODEL, self.poll_s)


@lru_cache(maxsize=2)
def _workload(scenario: Scenario, trace_file: Path) -> Workload:
    return scenario.workload(trace_file)


def _reported(job: Job, trace_file: Path) -> Report:
    return report(job.play(trace_file))


ARTICLE: Final = Scenario("dialogue", replicas=32)
TRACE_16: Final = Scenario("trace", replicas=16, speedup=2)
TRACE_64: Final = Scenario("trace", replicas=64, speedup=8)
GENERATED: Final = tuple(Scenario(name) for name in WORKLOADS if name != "dialogue")
HOT: Final = Scenario("hot_prefix", speedup=2)
ABLATED: Final = (
    TRACE_16,
    Scenario("trace", speedup=3),
    Scenario("tenants"),
    Scenario("tenants", speedup=1.4),
    Scenario("agents"),
    Scenario("bursts"),
    HOT,
    ARTICLE,
)
SIZES: Final = (4, 8, 16, 32, 64)
LOADS: Final = (0.6, 1, 2, 3, 4, 5)
WRONG: Final = (0.25, 0.5, 1, 2, 4)
POLLS_S: Final = (0.1, 0.5, 2.0, 5.0, 15.0)


class Results:
    """Collects the jobs of all sections, runs each once, and writes the page."""

    def __init__(self, trace_file: Path) -> None:
        self._trace = trace_file
        self._reports: dict[Job, Report] = {}

    def run(self, jobs: Iterable[Job]) -> None:
        wanted = list(dict.fromkeys(jobs))
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            done = pool.map(_reported, wanted, [self._trace] * len(wanted))
            for job, line in zip(wanted, done, strict=True):
                self._reports[job] = line
                print(
                    f"{len(self._reports)}/{len(wanted)} {job.scenario.source} {job.variant or job.policy}", flush=True
                )

    def page(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield INTRODUCTION.format(prefill=MODEL.prefill_tokens_per_s, kv=MODEL.kv_tokens)
        yield "## The article's scenario\n"
        yield "1,000 users, five turns each, 4,000 tokens of history, 32 replicas.\n"
        yield from self._policies(ARTICLE)
        yield "## Mooncake's conversation trace\n"
        for scenario in (TRACE_16, TRACE_64):
            yield f"### {scenario.replicas} replicas, {scenario.speedup:g} times as fast as recorded\n"
            yield from self._policies(scenario)
        yield "## Generated workloads, 16 replicas\n"
        for scenario in (*GENERATED, HOT):
            load = f" at {scenario.speedup:g} times the load" if scenario.speedup != 1 else ""
            yield f"### {scenario.source}{load}\n"
            yield " ".join((WORKLOADS[scenario.source].__doc__ or "").split()) + "\n"
            yield from self._policies(scenario)
        yield "## What each part is worth\n"
        yield "Mean TTFT in s, and hit rate. Routers share nothing.\n"
        yield from _table(
            ["", *(_name(scenario) for scenario in ABLATED)],
            [
                [variant, *(self._brief(Job(scenario, variant=variant)) for scenario in ABLATED)]
                for variant in ABLATIONS
            ],
        )
        yield from self._sensitivity()

    def _policies(self, scenario: Scenario) -> Iterator[str]:
        base = self._reports[Job(scenario, "round_robin")].ttft_mean_s
        yield from _table(
            [
                "policy",
                "hit rate",
                "TTFT mean",
                "of round robin",
                "p50",
                "p90",
                "p99",
                "later turns",
                "e2e",
                "max/mean",
            ],
            [self._row(self._reports[Job(scenario, policy)], base) for policy in POLICIES],
        )
        limit = bound(_workload(scenario, self._trace), scenario.replicas, MODEL)
        yield f"Bound: hit rate {limit.hit_rate:.3f}, mean TTFT {limit.ttft_mean_s:.3f}. `{scenario.command}`\n"
        if scenario in PICTURES:
            yield f"![TTFT and load](results/{PICTURES[scenario]})\n"

    @staticmethod
    def _row(line: Report, base_s: float) -> list[str]:
        later = line.follow_up_ttft_mean_s
        return [
            f"**{line.policy}**" if line.policy == "expected_work" else line.policy,
            f"{line.hit_rate:.3f}",
            f"{line.ttft_mean_s:.3f}",
            f"{line.ttft_mean_s / base_s:.2f}",
            f"{line.ttft_p50_s:.3f}",
            f"{line.ttft_p90_s:.3f}",
            f"{line.ttft_p99_s:.3f}",
            f"{later:.3f}" if later is not None else "",
            f"{line.e2e_mean_s:.1f}",
            f"{line.max_over_mean_load:.2f}",
        ]

    def _sensitivity(self) -> Iterator[str]:
        yield "## How it depends on circumstances\n"
        yield "Mean TTFT in s, and hit rate.\n\n### Size of the fleet, at the same load per replica (dialogue)\n"
        yield from self._columns(
            {str(size): [Job(s, p) for p in PICTURED] for size, s in _sizes()}, PICTURED, "replicas"
        )
        yield "### Load (the trace, 16 replicas)\n"
        yield from self._columns(
            {f"{s.speedup:g}x": [Job(s, p) for p in PICTURED] for s in _loads()}, PICTURED, "speed"
        )
        yield "### A wrong idea of the replicas' speed, and nothing that corrects it but engines' queues\n"
        yield from self._columns(
            {f"{factor:g}x": [job] for factor, job in _wrong()},
            ["expected_work, no first-token signal"],
            "assumed speed",
        )
        yield "### Old load figures\n"
        heads = ["1 router", "1 router, no first-token signal", "4 routers"]
        yield from self._columns({f"{poll_s:g} s": _polled(poll_s) for poll_s in POLLS_S}, heads, "read every")

    def _columns(self, rows: dict[str, list[Job]], heads: Sequence[str], corner: str) -> Iterator[str]:
        yield from _table([corner, *heads], [[label, *map(self._brief, jobs)] for label, jobs in rows.items()])

    def _brief(self, job: Job) -> str:
        line = self._reports[job]
        return f"{line.ttft_mean_s:.3f} ({line.hit_rate:.2f})"


def _sizes() -> list[tuple[int, Scenario]]:
    return [(size, Scenario("dialogue", replicas=size)) for size in SIZES]


def _loads() -> list[Scenario]:
    return [Scenario("trace", speedup=speedup) for speedup in LOADS]


def _wrong() -> list[tuple[float, Job]]:
    rate = MODEL.prefill_tokens_per_s
    return [(f, Job(TRACE_16, first_token_signal=False, assumed_tokens_per_s=f * rate)) for f in WRONG]


def _polled(poll_s: float) -> list[Job]:
    return [
        Job(TRACE_16, poll_s=poll_s),
        Job(TRACE_16, poll_s=poll_s, first_token_signal=False),
        Job(TRACE_16, poll_s=poll_s, routers=4),
    ]


def _jobs() -> Iterator[Job]:
    for scenario in (ARTICLE, TRACE_16, TRACE_64, *GENERATED, HOT):
        yield from (Job(scenario, policy) for policy in POLICIES)
    yield from (Job(scenario, variant=variant) for scenario in ABLATED for variant in ABLATIONS)
    yield from (Job(scenario, policy) for _, scenario in _sizes() for policy in PICTURED)
    yield from (Job(scenario, policy) for scenario in _loads() for policy in PICTURED)
    yield from (job for _, job in _wrong())
    for poll_s in POLLS_S:
        yield from _polled(poll_s)


PICTURES: Final = {ARTICLE: "dialogue.png", TRACE_16: "trace.png"}

INTRODUCTION: Final = """\
# Results

Made by `make results`; simulated, in virtual time, by the same `extproc.core` that serves. Nothing here was measured
on GPUs: an engine is a model of one (`sim/engine.py`) that prefills {prefill:g} tokens/s in chunks, keeps {kv:,} tokens
of KV cache and batches continuously. All times are in seconds; TTFT is the time from sending to the first token.

`scorers`, `radix`, `overlap_cost`, `work_times_batch` and `omniscient` look into the engines' true caches and queues
at the moment of decision, which no router can; that favours them. `expected_work`, `ring_spillover` and `bounded_load`
are policies of `extproc.core` and see what a router sees. `omniscient` minimises each request's own wait and is no
bound; the bound given with each table is that of one cache as large as all together, and no queues at all. Where
`scorers` is within a third of that bound, nothing can halve it: on the trace at 16 replicas the bound itself is 0.68
of `scorers`.
"later turns": mean TTFT of turns that follow another. "max/mean": mean requests in flight, busiest replica over all.
"""


def _name(scenario: Scenario) -> str:
    speedup = f" at {scenario.speedup:g}x" if scenario.speedup != 1 else ""
    return f"{scenario.source}{speedup}, {scenario.replicas} replicas"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|---|{'---:|' * (len(heads) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake's conversation trace, see sim/trace.py")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where results.md and its pictures go")
    args = parser.parse_args()
    pictures: Path = args.docs / "results"
    pictures.mkdir(parents=True, exist_ok=True)
    for name in PICTURES.values():
        plot.check(pictures / name)
    results = Results(args.trace)
    results.run(_jobs())
    for scenario, name in PICTURES.items():
        plot.draw([Job(scenario, policy).play(args.trace) for policy in PICTURED], pictures / name)
    (args.docs / "results.md").write_text(results.page(), encoding="utf-8")


if __name__ == "__main__":
    main()
