from __future__ import annotations

import sys
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from demo.ports import free_port
from demo.process import Process

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "sim-8b"
TIME_SCALE = 0.25


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A simulated replica in a process of its own, id "one", four times as fast; its base URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        *(sys.executable, "-m", "serve_app.engine", "--port", str(port), "--replica-id", "one"),
        *("--model", MODEL, "--time-scale", str(TIME_SCALE), "--kv-cache-tokens", "100000"),
    ]

    def healthy() -> bool:
        try:
            with urlopen(f"{url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, ConnectionError):
            return False

    with Process(command, tmp_path_factory.mktemp("replica") / "log") as process:
        process.wait_ready(healthy, "the replica is healthy")
        yield url
