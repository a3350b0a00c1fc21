"""`make run`: brings the stack up, plays the same conversations with and without affinity, and shows both."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import sys
import urllib.request
from pathlib import Path

from aiohttp import ClientError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from demo.conversation import AFFINITY, ROUND_ROBIN, Script, Summary, Turn, Way, play
from demo.stack import Stack
from serve_app.cluster import ClusterError
from serve_app.settings import VLLM_ON_CPU_ENV, AppSettings

VLLM_START_TIMEOUT_S = 900.0

console = Console()


def main() -> int:
    args = _arguments()
    # Also where a shell has started us in the background and with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a plain kill ends everything too
    try:
        with Stack(
            _app(args),
            args.directory,
            report=lambda step: console.print(f"[dim]... {step}"),
            deploy_timeout_s=VLLM_START_TIMEOUT_S if args.engine == "vllm" else 120.0,
        ) as stack:
            model = _model(stack.url)
            script = Script(users=args.users, turns=args.turns)
            before = _play(stack, model, ROUND_ROBIN, script)
            after = _play(stack, model, AFFINITY, script)
            console.print(_turns(before, after))
            console.print(_summary(Summary.of(before), Summary.of(after)))
            if not args.once:
                _stay(stack, model)
    except KeyboardInterrupt:
        console.print("\n[dim]ended")
    except (ClusterError, RuntimeError, OSError, ClientError) as error:
        console.print(f"[red]{error}")
        console.print(f"logs: {args.directory}")
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make run", description=__doc__)
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--model", default="", help="vLLM: path or hub id")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--engine-args", type=json.loads, default={}, help="vLLM: options as a JSON object")
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--once", action="store_true", help="end after the table")
    parser.add_argument("--directory", type=Path, default=Path(".run"), help="for logs and rendered configurations")
    args = parser.parse_args()
    if args.engine == "vllm" and not args.model:
        parser.error("with ENGINE=vllm name a model: MODEL=path-or-hub-id")
    return args


def _app(args: argparse.Namespace) -> AppSettings:
    if args.engine == "sim":
        return AppSettings(num_replicas=args.replicas)
    on_cpu = shutil.which("nvidia-smi") is None
    return AppSettings(
        engine="vllm",
        model=args.model,
        num_replicas=args.replicas,
        num_gpus=0 if on_cpu else None,
        engine_args=args.engine_args,
        env=VLLM_ON_CPU_ENV if on_cpu else {},
    )


def _model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def _play(stack: Stack, model: str, way: Way, script: Script) -> list[Turn]:
    columns = (TextColumn(f"{way.name:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(way.name, total=script.users * script.turns)
        return asyncio.run(play(stack.url, model, way, script, lambda turn: progress.advance(task)))


def _turns(before: list[Turn], after: list[Turn]) -> Table:
    names: dict[str, str] = {}

    def name(replica: str) -> str:
        return names.setdefault(replica, f"#{len(names) + 1}")

    table = Table(title="each turn: replica, tokens found in cache, time to first token")
    table.add_column("user")
    table.add_column("turn")
    table.add_column("prompt", justify="right")
    for way in (ROUND_ROBIN, AFFINITY):
        table.add_column(way.name, justify="left")
        table.add_column("cached", justify="right")
        table.add_column("TTFT", justify="right")
    for a, b in zip(before, after, strict=True):
        cells = [str(a.user + 1), str(a.number), str(b.prompt_tokens)]
        for turn in (a, b):
            cells += [name(turn.replica), str(turn.cached_tokens), f"{turn.ttft_s * 1000:.0f} ms"]
        table.add_row(*cells, end_section=a.number == max(turn.number for turn in before))
    return table


def _summary(before: Summary, after: Summary) -> Table:
    table = Table(title="both ways")
    table.add_column("")
    for heading in (ROUND_ROBIN.name, AFFINITY.name, "ratio"):
        table.add_column(heading, justify="right")
    for label, a, b, unit in (
        ("hit rate (cached / prompt tokens)", before.hit_rate, after.hit_rate, ""),
        ("mean TTFT", before.mean_ttft_s, after.mean_ttft_s, "ms"),
        ("mean TTFT of follow-up turns", before.follow_up_ttft_s, after.follow_up_ttft_s, "ms"),
        ("replicas per user", before.replicas_per_user, after.replicas_per_user, ""),
    ):
        shown = [f"{value * 1000:.0f} ms" if unit else f"{value:.2f}" for value in (a, b)]
        table.add_row(label, *shown, f"{b / a:.2f}" if a else "-")
    return table


def _stay(stack: Stack, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
    console.print(
        "\nTry one yourself; the header x-replica-id says who answered:\n\n"
        f"  curl -si {stack.url}/v1/chat/completions -H 'content-type: application/json' "
        f"-H 'x-session-id: me' -d '{json.dumps(body)}'\n",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    for label, place in (
        ("Envoy", stack.url),
        ("Envoy's admin", stack.envoy_admin),
        ("router (ext_proc, EDS, health)", stack.router_address),
        ("router's live page", stack.router_admin),
        ("router's metrics", f"{stack.router_admin}/metrics"),
        ("Ray dashboard", stack.cluster.dashboard_url),
        ("logs, spans, configurations", stack.directory.resolve()),
    ):
        console.print(f"  {label:32}{place}", highlight=False, soft_wrap=True)
    console.print("\nCtrl-C ends everything.")
    signal.pause()


if __name__ == "__main__":
    sys.exit(main())
