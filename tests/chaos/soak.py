"""Many requests, a tenth of them given up at some point: `python -m tests.chaos.soak --requests 200000`.

Over real gRPC at a real `extproc serve`, as Envoy speaks to it, but without Envoy and replicas, which would take most
of the time. What is left behind is looked at from outside: open leases, memory, descriptors, threads, and whether the
service can end at once, which it can't while a stream is open.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import grpc
import psutil
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders, ProcessingRequest

from demo.wait import until
from extproc.services import EXTERNAL_PROCESSOR
from tests.chaos.site import Router
from tests.component.serving import messages

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENTS = 16
SESSIONS = 2000
"""Few enough that the placement memory has seen all of them early, so that a slope later would be a leak."""
ABORTED = 0.1
SAMPLES = 100
LEAVING_S = 5.0

START = ProcessingRequest(response_headers=HttpHeaders())
for key, value in {":status": "200", "content-type": "text/event-stream", "x-prompt-tokens": "80"}.items():
    START.response_headers.headers.headers.add(key=key, raw_value=value.encode())


@dataclass
class Soak:
    """What came out of it. memory: (requests so far, resident bytes), in this order."""

    requests: int = 0
    aborted: dict[str, int] = field(default_factory=dict)
    unrouted: int = 0
    took_s: float = 0.0
    memory: list[tuple[int, int]] = field(default_factory=list)
    open_leases: float = -1
    descriptors_left: int = 0
    threads_left: int = 0
    leaving_s: float = 0.0

    @property
    def bytes_per_request(self) -> float:
        """Slope of the memory over the second half, by least squares."""
        half = self.memory[len(self.memory) // 2 :]
        mean_x, mean_y = (sum(each) / len(half) for each in zip(*half, strict=True))
        return sum((x - mean_x) * (y - mean_y) for x, y in half) / sum((x - mean_x) ** 2 for x, _ in half)

    def lines(self) -> list[str]:
        aborted = ", ".join(f"{count} {phase}" for phase, count in sorted(self.aborted.items()))
        return [
            f"{self.requests} requests in {self.took_s:.0f} s, {self.unrouted} not routed",
            f"given up: {aborted}",
            f"memory: {self.memory[0][1] / 1e6:.1f} MB at first, {self.memory[-1][1] / 1e6:.1f} MB at last, "
            f"{self.bytes_per_request:.1f} bytes per request over the second half",
            f"left: {self.open_leases:.0f} leases, {self.descriptors_left} descriptors, {self.threads_left} threads; "
            f"ended in {self.leaving_s:.1f} s",
        ]


PHASES = ("before its body", "before its decision", "once routed", "while answered")


async def ask(channel: grpc.aio.Channel, session: int, abort_at: str) -> bool:
    """One request; whether it was routed, as far as it came. abort_at: one of PHASES, or "" for a whole one."""
    multi: Any = channel.stream_stream(f"/{EXTERNAL_PROCESSOR}/Process")  # bytes, in and out
    call = multi()
    prompt = f"session {session} ".encode() * (20 + session % 20)
    opening, body = messages(
        b'{"messages": [{"role": "user", "content": "%s"}]}' % prompt, {"x-session-id": str(session)}
    )
    try:
        await call.write(opening.SerializeToString())
        await call.read()
        if abort_at == PHASES[0]:
            return True
        await call.write(body.SerializeToString())
        if abort_at == PHASES[1]:
            return True
        routed = b"x-gateway-destination-endpoint" in await call.read()
        if abort_at == PHASES[2]:
            return routed
        await call.write(START.SerializeToString())
        await call.read()
        if abort_at == PHASES[3]:
            return routed
        await call.done_writing()
        return routed and await call.read() is grpc.aio.EOF
    finally:
        if abort_at:
            call.cancel()


def plan(requests: int, seed: int = 8) -> Iterator[tuple[int, str]]:
    """Session and phase of abortion of each request."""
    dice = random.Random(seed)
    for _ in range(requests):
        yield dice.randrange(SESSIONS), dice.choice(PHASES) if dice.random() < ABORTED else ""


async def soak(directory: Path, requests: int) -> Soak:
    """Start a router, ask it, end it."""
    fleet = directory / "fleet.json"
    entries = [{"endpoint": f"10.0.0.{number}:8000"} for number in range(1, 9)]
    fleet.write_text(json.dumps({"replicas": entries}), encoding="utf-8")
    router = Router(
        directory,
        {
            "server": {"notice_s": 0.0, "drain_s": 60.0},
            "membership": {"source": "file", "file": str(fleet), "ask_models": False},
            "health": {"enabled": False},
            "load": {"enabled": False},
        },
    )
    router.start()
    try:
        await router.wait()
        return await _soak(router, requests)
    finally:
        await asyncio.to_thread(router.process.kill)


async def _soak(router: Router, requests: int) -> Soak:
    result, process = Soak(), psutil.Process(router.process.pid)
    work = plan(requests)

    async def client() -> None:
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{router.port}", [("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            for session, abort_at in work:
                result.unrouted += not await ask(channel, session, abort_at)
                result.requests += 1
                if abort_at:
                    result.aborted[abort_at] = result.aborted.get(abort_at, 0) + 1
                if result.requests % (requests // SAMPLES) == 0:
                    result.memory.append((result.requests, process.memory_info().rss))

    await _until_settled(router)
    descriptors, threads = process.num_fds(), process.num_threads()
    began_s = monotonic()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    result.took_s = monotonic() - began_s
    await _until_settled(router)

    async def closed() -> bool:
        return process.num_fds() <= descriptors

    with contextlib.suppress(TimeoutError):  # the count says it
        await until(closed, "its connections are closed", LEAVING_S)
    result.open_leases = await router.metric("extproc_open_leases")
    result.descriptors_left = max(0, process.num_fds() - descriptors)
    result.threads_left = max(0, process.num_threads() - threads)
    began_s = monotonic()
    await asyncio.to_thread(router.process.stop)
    result.leaving_s = monotonic() - began_s
    return result


async def _until_settled(router: Router) -> None:
    await router.wait_for_metric("extproc_open_leases", 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=200_000)
    with tempfile.TemporaryDirectory() as directory:
        result = asyncio.run(soak(Path(directory), parser.parse_args().requests))
    print(*result.lines(), sep="\n")
    left = result.open_leases or result.descriptors_left or result.threads_left or result.leaving_s > LEAVING_S
    return 1 if left or result.unrouted else 0


if __name__ == "__main__":
    sys.exit(main())
