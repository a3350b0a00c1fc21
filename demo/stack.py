"""Ray Serve, the router and Envoy on loopback, on free ports; everything that is started here also ends here."""

from __future__ import annotations

import json
import signal
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from demo.ports import free_ports
from demo.process import Process
from demo.wait import wait_until
from serve_app.cluster import RayCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from serve_app.settings import AppSettings

Sections = dict[str, dict[str, Any]]


def toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """A configuration file. JSON's strings, numbers and lists are TOML's too."""
    lines: list[str] = []
    for name, keys in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines[1:]) + "\n"


class Stack:
    """A fleet behind the router. A context manager.

    app: what Ray Serve runs. directory: for logs and rendered configurations. config: sections over the stack's own.
    report: told what is being started. cluster: one that runs `app` already; it outlives the stack.
    """

    def __init__(
        self,
        app: AppSettings,
        directory: Path,
        config: Mapping[str, Mapping[str, Any]] | None = None,
        report: Callable[[str], None] = lambda step: None,
        deploy_timeout_s: float = 120.0,
        cluster: RayCluster | None = None,
    ) -> None:
        self.app = app
        self.directory = directory
        self._config = config or {}
        self._report = report
        self._deploy_timeout_s = deploy_timeout_s
        self._cleanup = ExitStack()
        self.router_address = self.url = self.envoy_admin = self.router_admin = ""
        self.config_file = directory / "extproc.toml"
        self.spans_log = directory / "extproc.log"
        self._given_cluster = cluster
        self.cluster: RayCluster
        self.router: Process
        self.envoy: Process

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def _start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._given_cluster is not None:
            self.cluster = self._given_cluster
        else:
            self._report("starting a Ray cluster")
            self.cluster = RayCluster.start()
            self._cleanup.callback(self.cluster.stop)
            self._report(f"deploying {self.app.num_replicas} replicas ({self.app.engine})")
            self.cluster.deploy(self.app, timeout_s=self._deploy_timeout_s)
        # Only now: while it starts, Ray takes a hundred of the ports that were free before.
        router, listen, admin, router_admin = free_ports(4)
        self.router_address = f"127.0.0.1:{router}"
        self.url = f"http://127.0.0.1:{listen}"
        self.envoy_admin = f"http://127.0.0.1:{admin}"
        self.router_admin = f"http://127.0.0.1:{router_admin}"
        self._report("starting the router")
        self.config_file.write_text(toml(self._sections()), encoding="utf-8")
        self.start_router()
        self._report("starting Envoy")
        bootstrap = self.directory / "envoy.yaml"
        rendered = Process([*EXTPROC, "envoy-config", "--config", self.config_file], bootstrap)
        if rendered.wait(30) != 0:
            raise RuntimeError(rendered.log())
        self.envoy = Process(
            # Hot restart would let two Envoys of one machine meet in a shared memory segment.
            [ENVOY, "-c", bootstrap, "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"],
            self.directory / "envoy.log",
        )
        self._cleanup.callback(self.envoy.stop)
        self.envoy.wait_ready(self._is_routing, "Envoy knows the fleet and the router", 30.0)

    def _sections(self) -> Sections:
        sections: Sections = {
            "server": {"listen": self.router_address, "notice_s": 0.1, "drain_s": 2.0},
            "membership": {"source": "ray_serve", "ray_serve_url": self.cluster.dashboard_url},
            "telemetry": {"exporter": "console"},
            "admin": {"listen": self.router_admin.removeprefix("http://")},
            "envoy": {
                "listen": self.url.removeprefix("http://"),
                "admin": self.envoy_admin.removeprefix("http://"),
                "round_robin_route": True,
            },
        }
        for name, keys in self._config.items():
            sections.setdefault(name, {}).update(keys)
        return sections

    # ---------------------------------------------------------------------------------------------------- the router

    def start_router(self) -> None:
        """Start the router (again)."""
        started_at = len(self.spans_log.read_text()) if self.spans_log.exists() else 0
        self.router = Process([*EXTPROC, "serve", "--config", self.config_file], self.spans_log)
        self._cleanup.callback(self.router.stop)
        self.router.wait_ready(lambda: "membership changed" in self.router.log()[started_at:], "the router knows it")

    def kill_router(self) -> None:
        """End the router without a word."""
        self.router.send(signal.SIGKILL)
        self.router.wait()

    def spans(self) -> list[dict[str, Any]]:
        """The decisions written so far, oldest first: each span's attributes, with `trace_id` and `end_time` added."""
        found = []
        for line in self.router.log().splitlines():
            if line.startswith('{"name": "route"'):
                span = json.loads(line)
                found.append({**span["attributes"], "trace_id": span["context"]["trace_id"], "end": span["end_time"]})
        return found

    # ---------------------------------------------------------------------------------------------------- Envoy

    def wait_for_replicas(self, count: int, timeout_s: float = 30.0) -> None:
        """Wait until Envoy knows exactly so many replicas and asks the router."""
        wait_until(lambda: len(self._endpoints()) == count and self.sees_router(), f"{count} replicas", timeout_s)

    def _is_routing(self) -> bool:
        return len(self._endpoints()) == self.app.num_replicas and self.sees_router()

    def _endpoints(self) -> set[str]:
        lines = (line.split("::") for line in self._admin("/clusters").splitlines())
        return {words[1] for words in lines if len(words) > 2 and words[0] == "fleet" and "cx_active" in words[2]}

    def sees_router(self) -> bool:
        """Whether Envoy finds the router healthy."""
        lines = self._admin("/clusters").splitlines()
        return any(line.startswith("extproc::") and line.endswith("::health_flags::healthy") for line in lines)

    def _admin(self, path: str) -> str:
        try:
            with urllib.request.urlopen(self.envoy_admin + path, timeout=5) as answer:
                text: str = answer.read().decode()
                return text
        except (urllib.error.URLError, ConnectionError):
            return ""


ENVOY = Path(sys.executable).with_name("envoy")
EXTPROC = (sys.executable, "-m", "extproc")
