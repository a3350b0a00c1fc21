"""What a decision costs: `python -m bench.core [--json]`, and `make bench-core` for the compiled router.

Chats of growing length, twenty system prompts among them, go through a router in steady state: some requests in
flight, a full placement memory, loads that differ. Timed are reading the request (`extract`) and choosing the replica
(`Router.decide`); the best of several rounds counts, since everything else that runs here only adds.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from time import perf_counter_ns
from typing import TYPE_CHECKING, Final

from extproc.build import COMPILED
from extproc.core.features import Features, FeatureSettings, extract
from extproc.core.replica import Replica
from extproc.core.request import Request
from extproc.core.router import Router

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.core.decision import Decision

REPLICAS: Final = (4, 16, 256, 1024)
BODY_KIB: Final = (1, 4, 16, 64, 256)
HEAD_KIB: Final = 16
"""Length of the prompts in the table of decisions."""
CONVERSATIONS: Final = 500
SYSTEM_PROMPTS: Final = 20
ROUNDS: Final = 5
IN_FLIGHT_PER_REPLICA: Final = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one call, in microseconds: of the round with the least median."""

    p50_us: float
    p99_us: float


def chat(conversation: int, size_bytes: int, *, stream: bool = True) -> Request:
    """A chat of about so many bytes: half of it system prompt, the rest turns of some 400 bytes."""
    system = f"You are assistant {conversation % SYSTEM_PROMPTS}. " + "Answer in one sentence. " * (size_bytes // 48)
    messages = [{"role": "system", "content": system[: size_bytes // 2]}]
    turn = 0
    while len(json.dumps(messages)) < size_bytes:
        text = f"Turn {turn} of chat {conversation}: " + "what would you say about that? " * 12
        messages.append({"role": "assistant" if turn % 2 else "user", "content": text})
        turn += 1
    body = json.dumps({"model": "m", "stream": stream, "temperature": 0.7, "messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer secret", "user-agent": "bench"}
    return Request("POST", "/v1/chat/completions", headers, body)


def percentiles(durations_ns: Iterable[int]) -> Cost:
    ordered = sorted(durations_ns)
    return Cost(ordered[len(ordered) // 2] / 1e3, ordered[len(ordered) * 99 // 100] / 1e3)


def best_round(rounds: Iterable[list[int]]) -> Cost:
    return min(map(percentiles, rounds), key=lambda cost: cost.p50_us)


def cost_of_features(body_kib: int, requests: int = 200) -> Cost:
    """Of reading chats of this size."""
    requests_seen = [chat(number, body_kib * 1024) for number in range(requests)]
    settings = FeatureSettings()

    def play() -> list[int]:
        durations_ns = []
        for request in requests_seen:
            began_ns = perf_counter_ns()
            extract(request, settings)
            durations_ns.append(perf_counter_ns() - began_ns)
        return durations_ns

    return best_round(play() for _ in range(ROUNDS))


class Traffic:
    """A fleet of equal replicas in steady state, and turns of many chats that come one after another."""

    def __init__(self, replicas: int) -> None:
        self.router = Router()
        members = [Replica(f"replica-{n}", f"10.0.{n // 256}.{n % 256}:8000") for n in range(replicas)]
        self.router.set_members(members, 0.0)
        self._in_flight: deque[Decision] = deque()
        self._room = IN_FLIGHT_PER_REPLICA * replicas
        self._now_s = 0.0
        self._gap_s = 0.16 / replicas  # as many a second and replica, however many there are

    def decide(self, features: Features) -> int:
        """Nanoseconds that the decision took."""
        self._now_s += self._gap_s
        began_ns = perf_counter_ns()
        decision = self.router.decide(features, self._now_s)
        took_ns = perf_counter_ns() - began_ns
        self._in_flight.append(decision)
        if len(self._in_flight) > self._room:
            lease = self._in_flight.popleft().lease
            if lease is not None:
                self.router.first_token(lease, self._now_s)
                self.router.finish(lease, self._now_s)
        return took_ns


def features_of_chats(size_bytes: int) -> list[Features]:
    """Of CONVERSATIONS different ones."""
    settings = FeatureSettings()
    return [extract(chat(number, size_bytes), settings) for number in range(CONVERSATIONS)]


def cost_of_decision(replicas: int, features: list[Features], rounds: int = ROUNDS) -> Cost:
    """Of decisions in a fleet of this size, the features being known."""
    traffic = Traffic(replicas)
    for one in islice(cycle(features), IN_FLIGHT_PER_REPLICA * replicas):
        traffic.decide(one)
    return best_round([traffic.decide(one) for one in features * 2] for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.core", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json

    features = features_of_chats(HEAD_KIB * 1024)
    reading = {size: cost_of_features(size) for size in BODY_KIB}
    deciding = {replicas: cost_of_decision(replicas, features) for replicas in REPLICAS}
    if as_json:
        rows = {"features_by_kib": reading, f"decision_at_{HEAD_KIB}_kib_by_replicas": deciding}
        costs = {name: {n: asdict(cost) for n, cost in row.items()} for name, row in rows.items()}
        print(json.dumps({"compiled": COMPILED, **costs}))
        return
    print("compiled" if COMPILED else "interpreted")
    print("reading a chat           p50 us   p99 us")
    for size, cost in reading.items():
        print(f"{size:8} KiB          {cost.p50_us:9.1f}{cost.p99_us:9.1f}")
    print(f"deciding at {HEAD_KIB} KiB       p50 us   p99 us")
    for replicas, cost in deciding.items():
        print(f"{replicas:8} replicas     {cost.p50_us:9.1f}{cost.p99_us:9.1f}")
    both_us = reading[HEAD_KIB].p50_us + deciding[256].p50_us
    print(f"both, {HEAD_KIB} KiB and 256 replicas: {both_us:.0f} us")


if __name__ == "__main__":
    main()
