"""The admin port of the real process: health, and metrics that follow what happens."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from demo.ports import free_port
from demo.wait import wait_until
from tests.component.serving import Serving
from tests.support.metrics import figure

if TYPE_CHECKING:
    from pathlib import Path


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_health_and_metrics(tmp_path: Path) -> None:
    admin = free_port()
    with Serving(tmp_path, {"admin": {"listen": f"127.0.0.1:{admin}"}}) as serving:
        serving.wait_for("serving")
        assert get(admin, "/healthz") == (200, "ok\n")
        # No fleet file yet: alive, but not ready; and it says that the feed is lost.
        assert get(admin, "/readyz")[0] == 503
        wait_until(lambda: figure(get(admin, "/metrics")[1], "extproc_membership_failures_total") > 0, "a failed look")
        assert figure(get(admin, "/metrics")[1], "extproc_membership_stale") == 1

        serving.fleet("127.0.0.1:1", "127.0.0.1:2")
        wait_until(lambda: get(admin, "/readyz")[0] == 200, "ready")
        assert serving.route(b'{"messages": [{"role": "user", "content": "hello"}]}', **{"x-session-id": "s"}) in (
            "127.0.0.1:1",
            "127.0.0.1:2",
        )
        text = get(admin, "/metrics")[1]
        assert figure(text, "extproc_replicas") == 2
        assert figure(text, "extproc_membership_stale") == 0
        assert figure(text, "extproc_membership_age_seconds") < 5
        assert figure(text, "extproc_decisions_total", reason="session") == 1
        assert figure(text, "extproc_decisions_total") == 1
        assert figure(text, "extproc_decision_seconds_count") == 1
        assert figure(text, "extproc_placement_entries") > 0


def test_an_admin_port_that_is_taken_is_said_so(tmp_path: Path) -> None:
    with Serving(tmp_path) as other:
        other.wait_for("serving")
        directory = tmp_path / "second"
        directory.mkdir()
        second = Serving(directory, {"admin": {"listen": f"127.0.0.1:{other.port}"}})
        try:
            assert second.wait(20) == 1
            assert str(other.port) in second.log()
        finally:
            second.stop()
