"""What routing one request costs, side by side: `python -m bench.cost [--bodies 1000] [--peers envoy,smg] [--json]`.

Instant backends, several; a closed loop of 32 connections (wrk); every contender in turn, round after round, so that
what else the machine does falls on all of them; medians of the rounds. One line per contender and body size. CPU is
that of all the contender's processes, and of nobody else.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from bench.backends import Backends
from bench.contenders import replicas_of, start

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.contenders import Contender

CONNECTIONS: Final = 32
TURNS: Final = 8
WARM_UP_S: Final = 1
HEADS: Final = "contender          body    req/s   p50 ms   p99 ms   CPU us   RSS MB  errors  CPU by process"
LOAD: Final = Path(__file__).with_name("load.lua")


@dataclass(frozen=True, slots=True)
class Round:
    """One contender under load for some seconds. cpu_us: per request, by process."""

    requests: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    errors: int
    cpu_us: dict[str, float]


@dataclass(frozen=True, slots=True)
class Cost:
    """One line of output: medians of the rounds, errors of all. One with errors is not ranked."""

    contender: str
    body_bytes: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us_per_request: float
    cpu_us_by_process: dict[str, float]
    peak_rss_mb: float
    requests: int
    errors: int


def load(url: str, body_bytes: int, seconds: int, pause_ms: float = 0.0, turns: int = TURNS) -> dict[str, Any]:
    """Drive a closed loop; what wrk says at its end (bench/load.lua). Raises RuntimeError where wrk fails.

    pause_ms: of a connection between an answer and its next request, on the average. turns: of a session.
    """
    argv = ["wrk", "--threads", "1", "--connections", str(CONNECTIONS), "--duration", f"{seconds}s"]
    argv += ["--latency", "--timeout", "20s", "--script", str(LOAD), url, "--", str(body_bytes), str(pause_ms)]
    argv.append(str(turns))
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-1:] if done.returncode == 0 else []
    if not last or not last[0].startswith("{"):
        raise RuntimeError(f"wrk against {url}: {done.stderr or done.stdout}")
    said: dict[str, Any] = json.loads(last[0])
    return said


def measure(contender: Contender, body_bytes: int, seconds: int, pause_ms: float, turns: int) -> Round:
    before = contender.cpu_s()
    said = load(contender.url, body_bytes, seconds, pause_ms, turns)
    after = contender.cpu_s()
    requests = max(1, said["requests"])
    return Round(
        said["requests"],
        said["requests"] / said["seconds"],
        said["p50_ms"],
        said["p99_ms"],
        said["errors"],
        {role: (after[role] - before[role]) / requests * 1e6 for role in after},
    )


def compare(
    contenders: Sequence[Contender], bodies: Sequence[int], rounds: int, seconds: int, pause_ms: float, turns: int
) -> Iterator[Cost]:
    """All rounds of one body size before the next, contenders interleaved."""
    for body_bytes in bodies:
        found: dict[str, list[Round]] = {each.name: [] for each in contenders}
        for contender in contenders:
            load(contender.url, body_bytes, WARM_UP_S, pause_ms, turns)
        for _ in range(rounds):
            for contender in contenders:
                found[contender.name].append(measure(contender, body_bytes, seconds, pause_ms, turns))
        for contender in contenders:
            yield _summary(contender, body_bytes, found[contender.name])


def _summary(contender: Contender, body_bytes: int, rounds: Sequence[Round]) -> Cost:
    by_process = {role: median(each.cpu_us[role] for each in rounds) for role in rounds[0].cpu_us}
    return Cost(
        contender.name,
        body_bytes,
        round(median(each.requests_per_s for each in rounds), 1),
        round(median(each.p50_ms for each in rounds), 3),
        round(median(each.p99_ms for each in rounds), 3),
        round(median(sum(each.cpu_us.values()) for each in rounds), 1),
        {role: round(value, 1) for role, value in by_process.items()},
        round(contender.peak_rss_bytes() / 1e6, 1),
        sum(each.requests for each in rounds),
        sum(each.errors for each in rounds),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cost", description=__doc__)
    parser.add_argument("--bodies", default="1000,16000,220000,1000000", help="lengths in bytes")
    parser.add_argument(
        "--peers",
        default="envoy,smg,vllm-router,sglang-router",
        help="beside extproc and its floor (bench/contenders.py lists them)",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=4, help="of each round")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="of a connection between two requests; 0: none")
    parser.add_argument("--turns", type=int, default=TURNS, help="of a session, before another takes its place")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    if shutil.which("wrk") is None:
        print("bench.cost: wrk is missing (Debian: apt-get install wrk)", file=sys.stderr)
        return 2
    names = ["extproc", "floor", *filter(None, args.peers.split(","))]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
        backends = Backends(max(map(replicas_of, names)), Path(directory))
        stack.callback(backends.process.stop)
        contenders = [stack.enter_context(start(name, Path(directory), backends.addresses)) for name in names]
        if not args.json:
            print(HEADS)
        bodies = [int(each) for each in args.bodies.split(",")]
        for cost in compare(contenders, bodies, args.rounds, args.seconds, args.pause_ms, args.turns):
            print(json.dumps(asdict(cost)) if args.json else _row(cost), flush=True)
    return 0


def _row(cost: Cost) -> str:
    processes = ", ".join(f"{role} {value:.0f}" for role, value in cost.cpu_us_by_process.items())
    mark = "  NOT RANKED" if cost.errors else ""
    return (
        f"{cost.contender:14}{cost.body_bytes:9}{cost.requests_per_s:9.0f}{cost.p50_ms:9.2f}{cost.p99_ms:9.2f}"
        f"{cost.cpu_us_per_request:9.0f}{cost.peak_rss_mb:9.0f}{cost.errors:8}  {processes}{mark}"
    )


if __name__ == "__main__":
    sys.exit(main())
