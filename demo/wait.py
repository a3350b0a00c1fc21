"""Waiting for a condition, never for a time."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PAUSE_S = 0.02


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    """Return once `condition` holds. Raises TimeoutError, naming what was waited for."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"after {timeout_s} s still not so: {what}")
        time.sleep(PAUSE_S)


async def until(condition: Callable[[], Awaitable[object]], what: str, timeout_s: float = 10.0) -> None:
    """`wait_until` for a condition that is asked asynchronously."""
    deadline_s = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"after {timeout_s} s still not so: {what}")
        await asyncio.sleep(PAUSE_S)
