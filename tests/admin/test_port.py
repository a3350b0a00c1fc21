"""The admin port of the real process: health, and metrics that follow what happens."""

from __future__ import annotations

import re
import signal
import socket
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

from demo.ports import free_port
from demo.wait import wait_until
from extproc.address import split_address
from extproc.admin.settings import AdminSettings
from extproc.envoy_config import EnvoySettings
from extproc.server import ServerSettings
from tests.component.serving import Serving
from tests.support.metrics import figure
from tests.support.watched import Watched

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
            assert f"admin.listen: 127.0.0.1:{other.port} can't be had: Address already in use" in second.log()
            assert "Traceback" not in second.log()
        finally:
            second.stop()


@pytest.mark.parametrize("sent", [b"", b"POST /debug/explain HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"])
def test_the_service_ends_though_somebody_is_connected(watched: Watched, sent: bytes) -> None:
    port = int(watched.admin.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as idle:
        idle.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        idle.sendall(sent)
        watched.send(signal.SIGTERM)
        assert watched.wait(20) == 0


def test_a_router_port_that_is_taken_ends_the_admin_port_too(watched: Watched, tmp_path: Path) -> None:
    directory = tmp_path / "second"
    directory.mkdir()
    with Watched(directory, {"server": {"listen": f"127.0.0.1:{watched.port}"}}) as second:
        assert second.wait(20) == 1
        assert str(watched.port) in second.log()
        assert "Traceback" not in second.log()


def test_the_default_is_on_loopback_and_beside_envoys_own() -> None:
    host, port = split_address(AdminSettings().listen)
    assert host == "127.0.0.1"
    taken = {split_address(address)[1] for address in (EnvoySettings().admin, EnvoySettings().listen)}
    assert port not in taken | {split_address(ServerSettings().listen)[1]}


def test_metrics_say_their_format(watched: Watched) -> None:
    with urllib.request.urlopen(f"{watched.admin}/metrics", timeout=10) as answer:
        assert re.fullmatch(r"text/plain; version=[\d.]+; charset=utf-8", answer.headers["content-type"])
