"""What processes use: CPU seconds and memory, of a process and all that it started. Linux."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system time so far."""
    return sum(_cpu_s(each) for each in _family(pid))


def cpu_s_of_children(pid: int) -> float:
    """The same without its own."""
    return sum(_cpu_s(each) for each in _family(pid) if each != pid)


def peak_rss_bytes(pid: int) -> int:
    """The most that each ever held, added up."""
    return sum(_peak_rss_bytes(each) for each in _family(pid))


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _family(int(child))


def _cpu_s(pid: int) -> float:
    # The second field is the program's name in parentheses, and may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _peak_rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
