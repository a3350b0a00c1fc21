"""A real `extproc serve` with an admin port and two replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from demo.ports import free_port
from tests.component.serving import Serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FLEET = ("127.0.0.1:1", "127.0.0.1:2")


class Watched(Serving):
    """`admin`: the URL of its admin port."""

    def __init__(self, directory: Path) -> None:
        port = free_port()
        self.admin = f"http://127.0.0.1:{port}"
        super().__init__(directory, {"admin": {"listen": f"127.0.0.1:{port}", "recent_decisions": 5}})


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with Watched(tmp_path) as serving:
        serving.fleet(*FLEET)
        serving.wait_for("ready")
        yield serving
