"""What routing adds to a request's latency: `python -m bench.latency [--body 16000] [--json]`.

The ceiling of Envoy with this router is found first. Then, at 10, 50 and 80% of it, Envoy alone, the floor
(bench/floor.py) and this router get the same load in turn, round after round; medians of the rounds. 32 connections
pause between requests; one that waits does not ask, so queues that would build up in an open loop do not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.backends import Backends
from bench.contenders import BACKENDS, start
from bench.cost import CONNECTIONS, load

SHARES: Final = (0.1, 0.5, 0.8)
NAMES: Final = ("envoy", "floor", "extproc")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.latency", description=__doc__)
    parser.add_argument("--body", type=int, default=16_000, help="length in bytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=5, help="of each round")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
        backends = Backends(BACKENDS, Path(directory))
        stack.callback(backends.process.stop)
        contenders = [stack.enter_context(start(name, Path(directory), backends.addresses)) for name in NAMES]
        full = [load(contenders[-1].url, args.body, args.seconds) for _ in range(2)]
        ceiling = max(said["requests"] / said["seconds"] for said in full)
        if not args.json:
            print(f"ceiling: {ceiling:.0f} requests/s")
            print("  load  contender      req/s   p50 ms   p99 ms")
        for share in SHARES:
            pause_ms = CONNECTIONS / (ceiling * share) * 1000
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
            for _ in range(args.rounds):
                for contender in contenders:
                    found[contender.name].append(load(contender.url, args.body, args.seconds, pause_ms))
            for name, said in found.items():
                line = {
                    "share_of_ceiling": share,
                    "contender": name,
                    "requests_per_s": round(median(each["requests"] / each["seconds"] for each in said), 1),
                    "p50_ms": round(median(each["p50_ms"] for each in said), 3),
                    "p99_ms": round(median(each["p99_ms"] for each in said), 3),
                    "errors": sum(each["errors"] for each in said),
                }
                print(json.dumps(line) if args.json else _row(line), flush=True)
    return 0


def _row(line: dict[str, Any]) -> str:
    rates = f"{line['requests_per_s']:8.0f}{line['p50_ms']:9.2f}{line['p99_ms']:9.2f}"
    return f"{line['share_of_ceiling']:6.0%}  {line['contender']:12}{rates}"


if __name__ == "__main__":
    sys.exit(main())
