"""`extproc serve` before simulated replicas, and under what an operator does to it."""

from __future__ import annotations

import json
import queue
import signal
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import Request, urlopen

import grpc
import pytest

from demo.ports import free_ports
from demo.process import Process
from demo.stack import toml
from demo.wait import wait_until
from extproc.service import FILE_POLL_S
from tests.component.serving import Serving, messages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

ALL_ON = {"health": {}, "load": {"poll_s": 0.1}}


def chat(model: str, text: str = "hello", **more: object) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}], **more}).encode()


@contextmanager
def engines(directory: Path, *models: str) -> Iterator[list[str]]:
    """Simulated replicas; their endpoints."""
    ports = free_ports(len(models))
    with ExitStack() as stack:
        for port, model in zip(ports, models, strict=True):
            argv = [sys.executable, "-m", "serve_app.engine", "--port", str(port), "--model", model]
            process = stack.enter_context(Process(argv, directory / f"engine-{port}.log"))

            def healthy(port: int = port) -> bool:
                try:
                    return bool(urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200)
                except URLError:
                    return False

            process.wait_ready(healthy, "the replica is healthy")
        yield [f"127.0.0.1:{port}" for port in ports]


def test_a_request_goes_to_a_replica_of_its_model(tmp_path: Path) -> None:
    asking = {"EXTPROC_MEMBERSHIP__ASK_MODELS": "true"}
    with engines(tmp_path, "m", "n") as (m, n), Serving(tmp_path, ALL_ON, env=asking) as serving:
        serving.fleet(m, n)
        serving.wait_for("ready")
        for number in range(8):
            assert serving.route(chat("m", f"number {number}")) == m
            assert serving.route(chat("n", f"number {number}")) == n
        assert {serving.route(chat("unknown", f"number {number}")) for number in range(8)} <= {m, n}


def test_work_that_others_send_is_seen(tmp_path: Path) -> None:
    """Three long answers that the router knows nothing of; only the engine's own metrics tell."""
    with engines(tmp_path, "m", "m") as (busy, idle), Serving(tmp_path, ALL_ON) as serving, ExitStack() as stack:
        serving.fleet(busy, idle)
        serving.wait_for("ready")
        wait_until(lambda: {serving.route() for _ in range(8)} == {busy, idle}, "both are used")
        for _ in range(3):
            body = chat("m", stream=True, max_tokens=2000)
            request = Request(f"http://{busy}/v1/chat/completions", body, {"content-type": "application/json"})
            stack.enter_context(urlopen(request, timeout=10))
        wait_until(lambda: {serving.route() for _ in range(8)} == {idle}, "the busy one is spared")
        stack.close()
        wait_until(lambda: {serving.route() for _ in range(8)} == {busy, idle}, "both are used again")


def test_each_decision_is_one_line_on_the_console(tmp_path: Path) -> None:
    with Serving(tmp_path, {"telemetry": {"exporter": "console"}}) as serving:
        serving.fleet("10.0.0.1:8000")
        serving.wait_for("ready")
        for number in range(5):
            serving.route(**{"x-session-id": f"private-{number}"})
        serving.send(signal.SIGTERM)
        assert serving.wait() == 0
        spans = [json.loads(line) for line in serving.log().splitlines() if line.startswith('{"name": "route"')]
        assert [span["attributes"]["server.address"] for span in spans] == ["10.0.0.1"] * 5
        assert "private-" not in serving.log()


class OpenStream:
    """A request that is routed and whose answer goes on until `end`."""

    def __init__(self, serving: Serving) -> None:
        self._requests: queue.Queue[ProcessingRequest | None] = queue.Queue()
        for message in messages(b"", {}):
            self._requests.put(message)
        self._replies = serving.process(iter(self._requests.get, None))
        next(self._replies)

    def end(self) -> None:
        self._requests.put(None)
        assert list(self._replies) == []


def test_an_open_stream_may_end_before_the_service_does(tmp_path: Path) -> None:
    with Serving(tmp_path, env={"EXTPROC_SERVER__DRAIN_S": "60"}) as serving:
        serving.fleet("10.0.0.1:8000")
        serving.wait_for("ready")
        stream = OpenStream(serving)
        serving.send(signal.SIGTERM)
        assert serving.wait_for("leaving")["open_leases"] == 1
        stream.end()
        assert serving.wait(20) == 0


def test_a_stream_that_does_not_end_is_cut(tmp_path: Path) -> None:
    with Serving(tmp_path, env={"EXTPROC_SERVER__DRAIN_S": "0.2"}) as serving:
        serving.fleet("10.0.0.1:8000")
        serving.wait_for("ready")
        stream = OpenStream(serving)
        serving.send(signal.SIGTERM)
        assert serving.wait(20) == 0
        with pytest.raises(grpc.RpcError):
            stream.end()


def test_a_reload_cuts_no_stream(tmp_path: Path) -> None:
    with Serving(tmp_path) as serving:
        serving.fleet("10.0.0.1:8000")
        serving.wait_for("ready")
        stream = OpenStream(serving)
        serving.sections["routing"] = {"policy": "ring_spillover"}
        serving.write()
        serving.send(signal.SIGHUP)
        serving.wait_for("configuration reloaded")
        assert serving.route() == "10.0.0.1:8000"
        stream.end()


def test_what_waits_for_a_restart_is_said_at_each_reload(tmp_path: Path) -> None:
    with Serving(tmp_path) as serving:
        serving.wait_for("serving")
        serving.sections["telemetry"] = {"exporter": "console"}
        serving.write()
        serving.send(signal.SIGHUP)
        first = serving.wait_for("configuration reloaded")
        assert (first["changed"], first["after_restart"]) == ([], ["telemetry"])
        serving.send(signal.SIGHUP)
        second = serving.wait_for("configuration reloaded", 2)
        assert (second["changed"], second["after_restart"]) == ([], ["telemetry"])


def test_a_file_is_read_once_for_a_signal_and_a_change(tmp_path: Path) -> None:
    with Serving(tmp_path) as serving:
        serving.wait_for("serving")
        serving.sections["routing"] = {"policy": "ring_spillover"}
        serving.write()
        serving.send(signal.SIGHUP)
        assert serving.wait_for("configuration reloaded")["changed"] == ["routing"]
        # That nothing more happens can't be waited for, but that it had its chance can.
        until_s = time.monotonic() + 4 * FILE_POLL_S
        wait_until(lambda: time.monotonic() > until_s, "the file was looked at again")
        assert len(serving.events("configuration reloaded")) == 1


def test_a_mounted_file_is_replaced_by_its_link(tmp_path: Path) -> None:
    """As Kubernetes does with a ConfigMap; the old file stays as it is."""
    folders = [tmp_path / name for name in ("old", "new")]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "data").symlink_to("old")
    (tmp_path / "extproc.toml").symlink_to("data/extproc.toml")
    with Serving(tmp_path) as serving:
        serving.wait_for("serving")
        serving.sections["routing"] = {"policy": "ring_spillover"}
        (tmp_path / "new" / "extproc.toml").write_text(toml(serving.sections))
        (tmp_path / "next").symlink_to("new")
        (tmp_path / "next").replace(tmp_path / "data")
        assert serving.wait_for("configuration reloaded")["changed"] == ["routing"]


def test_a_file_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    with Serving(tmp_path) as serving:
        serving.fleet("10.0.0.1:8000")
        serving.wait_for("ready")
        serving.file.unlink()
        refused = serving.wait_for("new configuration refused, the old one stays")
        assert "No such file" in refused["errors"][0]
        assert serving.route() == "10.0.0.1:8000"
        serving.write()
        assert serving.wait_for("configuration reloaded")["changed"] == []
