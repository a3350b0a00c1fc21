"""Many requests, some of them given up: nothing of them is left. `make soak` takes 200,000 and measures the slope."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos.soak import LEAVING_S, PHASES, soak

if TYPE_CHECKING:
    from pathlib import Path

REQUESTS = 5_000
GROWTH_BYTES = 16_000_000
"""About 3 MB is usual: placement memory and allocator fill up. 3 kB kept of each request would be too much."""


@pytest.mark.e2e
async def test_nothing_is_left_of_many_requests(tmp_path: Path) -> None:
    result = await soak(tmp_path, REQUESTS)
    assert (result.requests, result.unrouted) == (REQUESTS, 0)
    assert result.aborted.keys() == set(PHASES)
    assert (result.open_leases, result.descriptors_left, result.threads_left) == (0, 0, 0)
    assert result.memory[-1][1] - result.memory[0][1] < GROWTH_BYTES, result.memory[-1]
    assert result.leaving_s < LEAVING_S, "no stream is left open"
