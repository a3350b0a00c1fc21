"""`extproc replay`: play a workload through a running Envoy, and compare with what the simulator predicts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sim import trace
from sim.arguments import positive, positive_int
from sim.engine import EngineModel
from sim.fleet import simulate
from sim.generate import WORKLOADS, Scale
from sim.performance import Answer, perform
from sim.policies import make
from sim.report import mean, quantile, report
from sim.script import as_workload, write

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from sim.script import Line
    from sim.workload import Workload

STACK_CONFIG: Final = Path(".run/extproc.toml")
"""Where `make run` leaves the configuration of its stack."""


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """How Envoy balances: the headers that choose its route, and the simulator's policy that does the same."""

    name: str
    headers: dict[str, str]
    policy: str


WAYS: Final = (
    Way("round_robin", {"x-balance": "round_robin"}, "round_robin"),
    Way("affinity", {}, "expected_work"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """hit_rate: cached tokens / prompt tokens. ttft: time to first token, from sending."""

    hit_rate: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One line of output.

    errors: requests without a whole answer; they count in nothing else. first_error: what came instead.
    late_max_s: the most by which the client sent later than due; where it is long, the client is what was measured.
    ratio: measured / predicted, None where nothing was predicted.
    """

    way: str
    requests: int
    errors: int
    first_error: str | None
    late_max_s: float
    measured: Figures
    predicted: Figures
    ratio: dict[str, float | None]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    text = "play a workload through a running Envoy, with affinity and by round robin, and compare with the simulator"
    parser = commands.add_parser("replay", help=text, description=text)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="FILE", type=Path, help="requests in Mooncake's format")
    source.add_argument("--workload", choices=WORKLOADS, help="requests that are generated")
    parser.add_argument("--url", help="Envoy's listener; default: that of `make run`, started in this directory")
    parser.add_argument("--model", help="default: the first that /v1/models lists")
    parser.add_argument("--requests", type=positive_int, default=500, help="so many of the first")
    parser.add_argument("--speedup", type=positive, default=1.0, help="of arrivals and pauses")
    parser.add_argument("--max-tokens", type=positive_int, help="no answer is longer")
    parser.add_argument("--replicas", type=positive_int, default=4, help="behind Envoy")
    model = EngineModel()
    parser.add_argument(
        "--prefill-tokens-per-s", type=positive, default=model.prefill_tokens_per_s, help="of a replica"
    )
    parser.add_argument("--kv-tokens", type=positive_int, default=model.kv_tokens, help="of a replica")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each way")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0: every request was answered. 1: some were not, or nothing could be played; why stands on stderr."""
    try:
        comparisons = list(_compare(args))
    except (OSError, ValueError) as error:
        print(f"extproc replay: {error}", file=sys.stderr)
        return 1
    if not args.json:
        Console().print(_table(comparisons))
    for line in comparisons:
        if line.errors:
            print(f"extproc replay: {line.way}: {line.errors} errors, the first {line.first_error}", file=sys.stderr)
    return 1 if any(line.errors for line in comparisons) else 0


def _compare(args: argparse.Namespace) -> Iterator[Comparison]:
    url = (args.url or _stack_url()).rstrip("/")
    model = args.model or _first_model(url)
    workload = _workload(args)
    script = write(workload, args.requests, args.speedup, args.max_tokens)
    # In serve_app's engines reading the KV cache costs nothing.
    engine = EngineModel(args.prefill_tokens_per_s, kv_tokens=args.kv_tokens, attention_s_per_token=0.0)
    for way in WAYS:
        predicted = report(simulate(as_workload(workload.name, script), make(way.policy), args.replicas, engine))
        comparison = _comparison(
            way.name,
            _play(script, url, model, way, quiet=args.json),
            Figures(**{each.name: getattr(predicted, each.name) for each in dataclasses.fields(Figures)}),
        )
        if args.json:
            print(json.dumps(dataclasses.asdict(comparison)), flush=True)
        yield comparison


def _workload(args: argparse.Namespace) -> Workload:
    if args.trace is not None:
        return trace.read(args.trace, seed=args.seed)
    return WORKLOADS[args.workload](Scale(args.replicas, args.requests, seed=args.seed))


def _play(script: Sequence[Sequence[Line]], url: str, model: str, way: Way, *, quiet: bool) -> list[Answer]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    stderr = Console(stderr=True)
    with Progress(*columns, console=stderr, transient=True, disable=quiet or not stderr.is_terminal) as bars:
        bar = bars.add_task(way.name, total=sum(map(len, script)))
        salt = secrets.token_hex(8)  # what an earlier play left in the caches helps nobody
        return asyncio.run(perform(script, url, model, way.headers, salt, lambda: bars.advance(bar)))


def _comparison(way: str, answers: Sequence[Answer], predicted: Figures) -> Comparison:
    good = [answer for answer in answers if answer.error is None]
    errors = [answer.error for answer in answers if answer.error is not None]
    if not good:
        raise ValueError(f"{way}: no request was answered; the first got {errors[0]}")
    ttfts = sorted(answer.ttft_s for answer in good)
    measured = Figures(
        sum(answer.cached_tokens for answer in good) / sum(answer.prompt_tokens for answer in good),
        mean(ttfts),
        *(quantile(ttfts, share) for share in (0.5, 0.9, 0.99)),
    )
    pairs = zip(dataclasses.asdict(measured).items(), dataclasses.astuple(predicted), strict=True)
    return Comparison(
        way=way,
        requests=len(answers),
        errors=len(errors),
        first_error=errors[0] if errors else None,
        late_max_s=max(answer.late_s for answer in answers),
        measured=measured,
        predicted=predicted,
        ratio={name: value / expected if expected else None for (name, value), expected in pairs},
    )


def _stack_url() -> str:
    try:
        config = tomllib.loads(STACK_CONFIG.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no {STACK_CONFIG}: `make run` first, or name Envoy with --url") from None
    return f"http://{config['envoy']['listen']}"


def _first_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def _table(comparisons: Sequence[Comparison]) -> Table:
    late_s = max(line.late_max_s for line in comparisons)
    table = Table(
        title="measured, predicted by the simulator, and the one over the other",
        caption=f"TTFT in s; the client was at most {late_s:.3f} s late in sending",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for head in ("way", "requests", "errors", "hits", "TTFT", "p50", "p90", "p99"):
        table.add_column(head, justify="left" if head == "way" else "right", no_wrap=True)
    for line in comparisons:
        measured, predicted = dataclasses.astuple(line.measured), dataclasses.astuple(line.predicted)
        table.add_row(line.way, str(line.requests), str(line.errors), *(f"{value:.3f}" for value in measured))
        table.add_row("  predicted", "", "", *(f"{value:.3f}" for value in predicted))
        ratios = ("-" if ratio is None else f"{ratio:.2f}" for ratio in line.ratio.values())
        table.add_row("  ratio", "", "", *ratios, end_section=True)
    return table
