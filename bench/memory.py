"""What the router's memory takes: `python -m bench.memory [--sessions 1000000]`.

Two tables. What an entry of the placement memory really takes: fills one as decisions do and asks tracemalloc; the
figures stand in extproc.core.placement as ENTRY_BYTES and HOLDING_BYTES. And what the whole process holds, everything
that `extproc serve` imports with it, after so many sessions have gone through a router as the defaults have it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tracemalloc

import extproc.service  # noqa: F401  # what a serving process has in memory
from bench import usage
from extproc.core.features import FeatureSettings, extract
from extproc.core.placement import PlacementMemory
from extproc.core.replica import Replica
from extproc.core.request import Request
from extproc.core.router import Router

ENTRIES = 100_000
"""Enough for the tables' doublings to average out; a table that has just doubled is half empty."""


def bytes_per_entry(holders: int, entries: int = ENTRIES) -> float:
    """Bytes that an entry with so many holders takes, its signature included."""
    tracemalloc.start()
    try:
        memory = PlacementMemory(2 * entries, sys.maxsize)
        for number in range(entries):
            for serial in range(1000, 1000 + holders):
                memory.remember([(512 + number, number.to_bytes(16, "little"))], serial, float(number))
        return tracemalloc.get_traced_memory()[0] / entries
    finally:
        tracemalloc.stop()


def play(sessions: int, replicas: int = 256) -> Router:
    """Let so many sessions say something once, a few thousand at a time."""
    router, settings = Router(), FeatureSettings()
    router.set_members([Replica(f"replica-{n}", f"10.0.{n // 250}.{n % 250}:8000") for n in range(replicas)], 0.0)
    padding = "Answer in one sentence, and stay with what the documents say. " * 30
    leases = []
    for number in range(sessions):
        text = f"You are assistant {number % 20}. {padding}"
        messages = [{"role": "system", "content": text}, {"role": "user", "content": f"{number} asks. {padding}"}]
        body = json.dumps({"model": "m", "messages": messages}).encode()
        headers = {"x-session-id": f"session-{number}"}
        now_s = number / 1000
        decision = router.decide(extract(Request("POST", "/v1/chat/completions", headers, body), settings), now_s)
        if decision.lease is not None:
            leases.append(decision.lease)
        if len(leases) == 4096:
            for lease in leases:
                router.finish(lease, now_s)
            leases.clear()
            router.tick(now_s)
    return router


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--sessions", type=int, default=100_000)
    sessions = parser.parse_args().sessions
    before_bytes = usage.peak_rss_bytes(os.getpid())
    router = play(sessions)
    after_bytes = usage.peak_rss_bytes(os.getpid())
    memory, limit = router.memory, router.settings
    print(f"process: {before_bytes / 1e6:.0f} MB before, {after_bytes / 1e6:.0f} MB after {sessions} sessions")
    print(f"placement memory: {len(memory)} entries of {limit.placement_entries} allowed")
    for holders in (1, 2, 4, 8, 16):
        size = bytes_per_entry(holders)
        print(f"{holders:3} holders: {size:6.0f} bytes, {size / holders:5.0f} a holder")


if __name__ == "__main__":
    main()
