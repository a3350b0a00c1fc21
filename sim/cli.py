"""`extproc simulate`: compare policies on a trace or a generated workload."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sim import plot, trace
from sim.arguments import positive, positive_int
from sim.engine import EngineModel
from sim.fleet import POLL_S, simulate
from sim.generate import REQUESTS, WORKLOADS, Scale
from sim.policies import POLICIES, Conditions, make
from sim.report import Report, report

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.fleet import Run
    from sim.workload import Workload


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    text = "play a workload over a simulated fleet, under each of several policies"
    parser = commands.add_parser("simulate", help=text, description=text)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="FILE", type=Path, help="requests in Mooncake's format")
    source.add_argument("--workload", choices=WORKLOADS, help="requests that are generated")
    parser.add_argument("--policies", type=_policies, default=list(POLICIES), help=f"of {','.join(POLICIES)}")
    parser.add_argument("--replicas", type=positive_int, default=16)
    parser.add_argument("--requests", type=positive_int, default=REQUESTS, help="of a workload, about")
    parser.add_argument("--speedup", type=positive, default=1.0, help="of arrivals")
    parser.add_argument("--routers", type=positive_int, default=1, help="independent instances of ours")
    parser.add_argument(
        "--signal",
        choices=("first_token", "none"),
        default="first_token",
        help="what engines' answers tell our router of their prefill",
    )
    model = EngineModel()
    parser.add_argument("--prefill-tokens-per-s", type=positive, default=model.prefill_tokens_per_s)
    parser.add_argument("--kv-tokens", type=positive_int, default=model.kv_tokens)
    parser.add_argument("--poll-s", type=positive, default=POLL_S, help="how often engines' metrics are read")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each policy")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw TTFT and load over time (a .png, .svg or .pdf)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0: done. 1: the workload or the plot can't be had, and why stands on stderr."""
    try:
        if args.plot is not None:
            plot.check(args.plot)
        runs = _play(args)
        if args.plot is not None:
            plot.draw(runs, args.plot)
    except (OSError, ValueError, ImportError) as error:
        print(f"extproc simulate: {error}", file=sys.stderr)
        return 1
    return 0


def _play(args: argparse.Namespace) -> list[Run]:
    workload = _workload(args)
    model = EngineModel(prefill_tokens_per_s=args.prefill_tokens_per_s, kv_tokens=args.kv_tokens)
    conditions = Conditions(routers=args.routers, first_token_signal=args.signal == "first_token", seed=args.seed)
    runs, reports = [], []
    stderr = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr, transient=True, disable=args.json or not stderr.is_terminal) as bars:
        for name in args.policies:
            bar = bars.add_task(name, total=len(workload))
            progress: Callable[[int], None] = lambda done, bar=bar: bars.update(bar, completed=done)  # type: ignore[misc]  # noqa: E731
            played = simulate(workload, make(name, conditions), args.replicas, model, args.poll_s, progress)
            line = report(played)
            bars.remove_task(bar)
            if args.json:
                print(json.dumps(dataclasses.asdict(line)), flush=True)
            reports.append(line)
            if args.plot is not None:
                runs.append(played)
    if not args.json:
        Console().print(_table(workload.name, reports))
    return runs


def _workload(args: argparse.Namespace) -> Workload:
    if args.trace is not None:
        return trace.read(args.trace, args.speedup, args.seed)
    return WORKLOADS[args.workload](Scale(args.replicas, args.requests, args.speedup, args.seed))


def _table(title: str, reports: list[Report]) -> Table:
    table = Table(
        title=f"{title}: {reports[0].requests} requests",
        caption="TTFT and e2e in s; load: in flight, busiest replica / mean",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for head in ("policy", "hits", "TTFT", "p50", "p90", "p99", "e2e", "load", "state"):
        table.add_column(head, justify="left" if head == "policy" else "right", no_wrap=True)
    for line in reports:
        times = line.ttft_mean_s, line.ttft_p50_s, line.ttft_p90_s, line.ttft_p99_s, line.e2e_mean_s
        table.add_row(
            line.policy,
            f"{line.hit_rate:.3f}",
            *(f"{time_s:.3f}" for time_s in times),
            f"{line.max_over_mean_load:.2f}",
            str(line.state_entries),
        )
    return table


def _policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"no policy is called {name!r}; there are {', '.join(POLICIES)}")
    return names
