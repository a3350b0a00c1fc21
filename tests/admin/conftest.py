"""A router that is watched, and two replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.watched import FLEET, Watched

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with Watched(tmp_path) as serving:
        serving.fleet(*FLEET)
        serving.wait_for("ready")
        yield serving
