"""What it costs to ask a fleet for its load: `python -m bench.polling [--replicas 256] [--seconds 10]`.

Replicas are ports of one other process that answer at once, as vLLM does, with the families that were asked for. Shown
are the poller's own CPU as a share of one core, and by how much it delays what else runs on the same event loop, which
is where decisions are made.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from typing import Final

from demo.ports import free_ports
from extproc.core.replica import EngineLoad, Replica
from extproc.feeds.engine_metrics import EngineMetrics, LoadSettings, parse

LAG_STEP_S: Final = 0.005

LABELS: Final = 'engine="0",model_name="m"'
PAGE: Final = "".join(
    f"# HELP {name} A figure.\n# TYPE {name} gauge\n{name}{{{labels}}} {value}\n"
    for name, labels, value in (
        ("vllm:num_requests_running", LABELS, 7.0),
        ("vllm:num_requests_waiting", LABELS, 2.0),
        ("vllm:kv_cache_usage_perc", LABELS, 0.42),
        ("vllm:prefix_cache_queries_total", LABELS, 123456.0),
        ("vllm:prefix_cache_hits_total", LABELS, 65432.0),
        ("vllm:cache_config_info", f'block_size="16",{LABELS},num_gpu_blocks="25000"', 1.0),
    )
).encode()
ANSWER: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n" % len(PAGE) + PAGE


class _Engine(asyncio.Protocol):
    """Answers whatever is asked."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(ANSWER)


async def _serve(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(_Engine, "127.0.0.1", port)
    print("listening", flush=True)
    await asyncio.Event().wait()


async def _poll(ports: list[int], seconds: float) -> tuple[int, float, list[float]]:
    """(answers, CPU seconds, delays of the event loop in seconds, ascending)."""
    replicas = [Replica(str(port), f"127.0.0.1:{port}") for port in ports]
    answers, delays_s = 0, []

    def count(replica_id: str, load: EngineLoad) -> None:
        nonlocal answers
        answers += 1

    poller = asyncio.create_task(EngineMetrics(LoadSettings(), lambda: replicas, count).run())
    await asyncio.sleep(1.0)  # connections are made once
    answers, cpu_s, ends_s = 0, time.process_time(), time.monotonic() + seconds
    while (began_s := time.monotonic()) < ends_s:
        await asyncio.sleep(LAG_STEP_S)
        delays_s.append(time.monotonic() - began_s - LAG_STEP_S)
    cpu_s = time.process_time() - cpu_s
    poller.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await poller
    return answers, cpu_s, sorted(delays_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--serve", metavar="PORTS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(_serve([int(port) for port in args.serve.split(",")]))
        return
    assert parse(PAGE).running == 7
    ports = free_ports(args.replicas)
    engines = subprocess.Popen(
        [sys.executable, "-m", "bench.polling", "--serve", ",".join(map(str, ports))], stdout=subprocess.PIPE
    )
    try:
        assert engines.stdout is not None
        engines.stdout.readline()  # "listening"
        idle = asyncio.run(_poll([], args.seconds / 2))
        answers, cpu_s, delays_s = asyncio.run(_poll(ports, args.seconds))
    finally:
        engines.terminate()
        engines.wait()
    print(f"{args.replicas} replicas, {answers / args.seconds:.0f} answers/s")
    print(f"CPU: {cpu_s / args.seconds:.1%} of a core, {cpu_s / max(1, answers) * 1e6:.0f} us an answer")
    for name, delays in (("with polling", delays_s), ("without", idle[2])):
        p50_ms, p99_ms = (delays[int(len(delays) * share)] * 1e3 for share in (0.5, 0.99))
        print(
            f"delay of the event loop {name}: p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms, max {delays[-1] * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    main()
