"""What an entry of the placement memory really takes: `python -m bench.memory`.

Fills a memory as decisions do and asks tracemalloc. The figures stand in extproc.core.placement as ENTRY_BYTES and
HOLDING_BYTES.
"""

from __future__ import annotations

import sys
import tracemalloc

from extproc.core.placement import PlacementMemory

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


def main() -> None:
    for holders in (1, 2, 4, 8, 16):
        size = bytes_per_entry(holders)
        print(f"{holders:3} holders: {size:6.0f} bytes, {size / holders:5.0f} a holder")


if __name__ == "__main__":
    main()
