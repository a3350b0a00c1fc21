"""`extproc serve` with an admin port."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from demo.ports import free_port
from tests.component.serving import Serving

if TYPE_CHECKING:
    from pathlib import Path

FLEET = ("127.0.0.1:1", "127.0.0.1:2")


class Watched(Serving):
    """`admin`: the URL of its admin port."""

    def __init__(self, directory: Path, *sections: dict[str, dict[str, Any]]) -> None:
        port = free_port()
        self.admin = f"http://127.0.0.1:{port}"
        super().__init__(directory, {"admin": {"listen": f"127.0.0.1:{port}", "recent_decisions": 5}}, *sections)
