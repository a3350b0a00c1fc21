"""How a process that serves deals with memory. Called once, when all that stays has been made."""

from __future__ import annotations

import ctypes
import gc
from typing import Final

MIB: Final = 1024 * 1024
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""mallopt(3)."""


def calm_collector() -> None:
    """Let the garbage collector look less often, and never at what the start has made.

    A request leaves no cycles behind, so nearly all that it looks at is alive. CPython's default is every 700 objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 20)


def keep_memory() -> None:
    """Let the C library keep what it has freed.

    By its defaults it gives a body's megabytes back to the kernel after each request, and to touch them again costs
    more than to read them. Elsewhere than on glibc nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, 32 * MIB)
    mallopt(M_TRIM_THRESHOLD, 64 * MIB)
