"""The real `extproc serve`: what it prints, what it takes in under way, how it ends."""

from __future__ import annotations

import json
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from demo.ports import free_port
from demo.process import Process
from demo.wait import wait_until
from extproc.build import COMPILED
from tests.component.serving import SERVE, Serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path) as service:
        service.wait_for("serving")
        yield service


def test_it_says_whether_it_is_compiled(serving: Serving) -> None:
    assert serving.wait_for("serving")["compiled"] is COMPILED


def test_it_is_ready_when_it_knows_its_fleet_and_follows_it(serving: Serving) -> None:
    serving.wait_for("membership feed lost, the last known members stay")  # there is no file yet
    assert not serving.is_ready()
    assert serving.route() is None
    serving.fleet("10.0.0.1:8000")
    assert serving.wait_for("ready")["replicas"] == 1
    assert serving.is_ready()
    assert serving.route() == "10.0.0.1:8000"

    serving.fleet("10.0.0.2:8000", "10.0.0.3:8000")
    changed = serving.wait_for("membership changed", 2)
    assert (changed["joined"], changed["left"]) == (["10.0.0.2:8000", "10.0.0.3:8000"], ["10.0.0.1:8000"])
    assert {serving.route() for _ in range(8)} == {"10.0.0.2:8000", "10.0.0.3:8000"}
    sessions = {serving.route(**{"x-session-id": "mine"}) for _ in range(4)}
    assert len(sessions) == 1


@pytest.mark.parametrize("by", ["signal", "file"])
def test_a_good_configuration_is_taken_in_and_a_bad_one_refused(serving: Serving, by: str) -> None:
    serving.fleet("10.0.0.1:8000")
    serving.wait_for("ready")

    def change() -> None:
        serving.write()
        if by == "signal":
            serving.send(signal.SIGHUP)

    serving.sections["routing"] = {"vnodes": 0, "polcy": "expected_work"}
    change()
    refused = serving.wait_for("new configuration refused, the old one stays")
    assert any("routing.polcy: unknown key; did you mean policy?" in error for error in refused["errors"])
    assert serving.route() == "10.0.0.1:8000"

    serving.sections["routing"] = {"policy": "bounded_load"}
    serving.sections["membership"] = {"source": "static", "ask_models": False}
    serving.sections["membership"]["replicas"] = []  # a static fleet of none is refused, too
    change()
    serving.wait_for("new configuration refused, the old one stays", 2)

    serving.sections["membership"] = {"source": "file", "file": str(serving.file.parent / "other.json"), "poll_s": 0.05}
    serving.sections["telemetry"] = {"exporter": "console"}
    (serving.file.parent / "other.json").write_text('{"replicas": [{"endpoint": "10.0.0.9:8000", "models": ["m"]}]}')
    change()
    reloaded = serving.wait_for("configuration reloaded")
    assert (reloaded["changed"], reloaded["after_restart"]) == (["membership", "routing"], ["telemetry"])
    wait_until(lambda: serving.route() == "10.0.0.9:8000", "the new fleet is in force")


class Replica:
    """A replica that only knows how it feels: `status` is its answer to every probe."""

    def __init__(self) -> None:
        replica = self
        self.status = 200

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.send_response(replica.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Replica:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def test_a_replica_that_is_unwell_is_left_and_found_again(tmp_path: Path) -> None:
    health = {"health": {"probe_s": 0.1, "timeout_s": 1.0}}
    with Replica() as one, Replica() as two, Serving(tmp_path, health) as serving:
        serving.fleet(one.endpoint, two.endpoint)
        serving.wait_for("ready")
        session = {"x-session-id": "mine"}
        home = serving.route(**session)
        sick, other = (one, two) if home == one.endpoint else (two, one)

        sick.status = 503
        wait_until(lambda: serving.route(**session) == other.endpoint, "the session has left its home")
        assert {serving.route() for _ in range(8)} == {other.endpoint}

        other.status = 503  # none is well: better an unwell one than none
        wait_until(lambda: len(serving.events("replica unwell")) == 2, "both are unwell")
        assert serving.route() in {one.endpoint, two.endpoint}

        one.status = two.status = 200
        wait_until(lambda: {serving.route() for _ in range(8)} == {one.endpoint, two.endpoint}, "both are used again")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_gracefully(serving: Serving, number: signal.Signals) -> None:
    serving.fleet("10.0.0.1:8000")
    serving.wait_for("ready")
    serving.send(number)
    assert serving.wait() == 0
    assert "Traceback" not in serving.log()


def test_a_port_in_use_is_said_so(serving: Serving, tmp_path: Path) -> None:
    second = Process([*SERVE, "--config", serving.file], tmp_path / "second.log")
    assert second.wait(20) == 1
    assert f"127.0.0.1:{serving.port}" in second.log()
    assert "Traceback" not in second.log()


def test_a_wrong_configuration_is_said_so(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text("[server]\nlisten = 'here'\n[load]\npoll_s = 'often'\n")
    process = Process([*SERVE, "--config", file], tmp_path / "log", {"EXTPROC_ROUTING__VNODES": "-1"})
    assert process.wait(20) == 2
    assert process.log().splitlines() == [
        f"{file}: server: listen: expected \"host:port\", got 'here'",
        f"{file}: load.poll_s: Input should be a valid number, unable to parse string as a number",
        "EXTPROC_ROUTING__VNODES: routing: vnodes must be above 0",
    ]


class Collector:
    """An OTLP receiver for JSON over HTTP: the spans it was sent."""

    def __init__(self) -> None:
        spans = self.spans = list[dict[str, Any]]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                document = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path == "/v1/traces":
                    for resource in document["resourceSpans"]:
                        spans.extend(span for scope in resource["scopeSpans"] for span in scope["spans"])
                self.send_response(200)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> Collector:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def test_spans_reach_a_collector_as_children_of_the_clients_trace(tmp_path: Path) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with Collector() as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server.server_port}"}
        with Serving(tmp_path, {"telemetry": {"exporter": "otlp"}}, env=env) as serving:
            serving.fleet("10.0.0.1:8000")
            serving.wait_for("ready")
            serving.route(traceparent=f"00-{trace_id}-{parent_id}-01")
            serving.route(traceparent=f"00-{trace_id}-{parent_id}-00")  # nobody keeps this one
        (span,) = collector.spans
    assert (span["traceId"], span["parentSpanId"]) == (trace_id, parent_id)
    attributes = {each["key"]: next(iter(each["value"].values())) for each in span["attributes"]}
    assert attributes["server.address"] == "10.0.0.1"
    assert attributes["routing.reason"] == "no_affinity"


def test_a_dead_collector_harms_nothing(tmp_path: Path) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with Serving(tmp_path, {"telemetry": {"exporter": "otlp"}}, env=env) as serving:
        serving.fleet("10.0.0.1:8000")
        serving.wait_for("ready")
        assert {serving.route() for _ in range(50)} == {"10.0.0.1:8000"}
        began_s = time.monotonic()
        serving.send(signal.SIGTERM)
        assert serving.wait(20) == 0
        assert time.monotonic() - began_s < 10  # the exporter's own patience is 30 s
