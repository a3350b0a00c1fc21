"""A Ray cluster of one node on loopback, with direct ingress on, that leaves nothing behind.

For demos and tests. Every port is a free one and the session lives in a directory of its own, so several
clusters can run on one machine; `stop` ends exactly the processes that `start` brought up.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil

import serve_app
from serve_app import direct_ingress
from serve_app.app import DEPLOYMENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from serve_app.direct_ingress import ReplicaAddress
    from serve_app.settings import AppSettings

_INGRESS_PORTS = range(20000, 32000)  # below Linux's ephemeral ports, which start at 32768
_PORTS_PER_CLUSTER = 100
_API = "/api/serve/applications/"
_REQUEST_TIMEOUT_S = 10.0
_POLL_S = 0.1
_KILL_TIMEOUT_S = 10.0
_START_LOG = "ray-start.log"


class ClusterError(RuntimeError):
    """The cluster or an application on it did not come up; the message has Ray's own words."""


class RayCluster:
    """Use `RayCluster.start()`; also a context manager that stops it."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, dashboard_port: int):
        self.dashboard_url = f"http://127.0.0.1:{dashboard_port}"
        self._process = process
        self._directory = directory
        self._proxy_port = _free_port()
        self._applications: dict[str, dict[str, Any]] = {}

    @classmethod
    def start(cls, *, num_cpus: int = 16, min_draining_s: float = 5.0, timeout_s: float = 60.0) -> RayCluster:
        """Start a head node and wait until its REST API answers.

        num_cpus: what Ray believes it may hand out; replicas of the simulated engine use next to nothing.
        min_draining_s: a replica that is scaled away keeps listening at least so long, which gives whoever
            polls membership time to notice. Raises ClusterError.
        """
        # Unix socket paths end at 107 bytes and Ray adds some 70 of its own: hence not $TMPDIR.
        directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        dashboard_port, gcs_port = _free_port(), _free_port()
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--node-ip-address=127.0.0.1", f"--port={gcs_port}", f"--num-cpus={num_cpus}"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}"),
            *("--dashboard-agent-listen-port=0", "--dashboard-agent-grpc-port=0", "--metrics-export-port=0"),
            *(f"--ray-client-server-port={_free_port()}", "--min-worker-port=0", "--max-worker-port=0"),
            *(f"--temp-dir={directory}", "--object-store-memory=100000000", "--disable-usage-stats"),
        ]
        package_root = str(Path(serve_app.__file__).parent.parent)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")])),
            "RAY_AUTH_MODE": "disabled",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # or the node's address isn't loopback after all
            **direct_ingress.environment(_free_span(), _PORTS_PER_CLUSTER, min_draining_s),
        }
        with (directory / _START_LOG).open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        cluster = cls(process, directory, dashboard_port)
        atexit.register(cluster.stop)
        try:
            cluster._wait(cluster._answers, timeout_s, "Ray's REST API")
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @property
    def pid(self) -> int:
        """Of `ray start`, whose descendants are all of the cluster."""
        return self._process.pid

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def deploy(
        self, settings: AppSettings, *, name: str = "default", route_prefix: str = "/", timeout_s: float = 60.0
    ) -> None:
        """Deploy or update an application beside the others, and wait until it serves.

        Other `settings` than before roll the replicas, one batch after another. Raises ClusterError.
        """
        self._applications[name] = {
            "name": name,
            "route_prefix": route_prefix,
            "import_path": "serve_app.app:build",
            "args": settings.model_dump(exclude={"num_replicas"}),
            "deployments": [{"name": DEPLOYMENT, "num_replicas": settings.num_replicas}],
        }
        self._apply(name, timeout_s)

    def scale(self, num_replicas: int, *, name: str = "default", timeout_s: float = 60.0) -> None:
        """Change the number of replicas and wait until just so many take requests; the others stay as they are.

        Replicas that have to go may still be draining on return.
        """
        self._applications[name]["deployments"][0]["num_replicas"] = num_replicas
        self._apply(name, timeout_s)

    def delete(self, name: str, *, timeout_s: float = 60.0) -> None:
        """Remove an application and wait until its replicas are gone."""
        del self._applications[name]
        self._put()
        self._wait(lambda: name not in self._details()["applications"], timeout_s, f"the end of {name}")

    def replicas(self, name: str = "default") -> list[ReplicaAddress]:
        """The replicas that take requests, as Serve's REST API lists them at this moment."""
        return direct_ingress.replicas(self._details(), name)

    def stop(self) -> None:
        """End all processes of the cluster and remove its directory. Does nothing the second time."""
        atexit.unregister(self.stop)
        if self._process.poll() is None:
            # Killed, since Ray's own way takes half a minute and there is no state to save. A worker that
            # starts just now and isn't in the list ends by itself when it misses its raylet.
            processes = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            self._process.wait()
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, _KILL_TIMEOUT_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _apply(self, name: str, timeout_s: float) -> None:
        application = self._applications[name]
        before_s = self._details()["applications"].get(name, {}).get("last_deployed_time_s", 0)
        self._put()

        def serves() -> bool:
            details = self._details()
            status = details["applications"].get(name, {})
            if status.get("last_deployed_time_s", 0) <= before_s:
                return False
            if status["status"] == "DEPLOY_FAILED":
                raise ClusterError(f"application {name}: {status['message']}")
            wanted = application["deployments"][0]["num_replicas"]
            found = len(direct_ingress.replicas(details, name))
            return bool(status["status"] == "RUNNING") and found == wanted

        self._wait(serves, timeout_s, f"application {name}")

    def _put(self) -> None:
        config = {
            "proxy_location": "HeadOnly",  # "Disabled" would take the replicas' own listeners along
            "http_options": {"host": "127.0.0.1", "port": self._proxy_port},
            "logging_config": {"enable_access_log": False},
            "applications": list(self._applications.values()),
        }
        request = Request(
            f"{self.dashboard_url}{_API}",
            method="PUT",
            data=json.dumps(config).encode(),
            headers={"content-type": "application/json"},
        )
        try:
            with urlopen(request, timeout=_REQUEST_TIMEOUT_S):
                pass
        except HTTPError as error:
            raise ClusterError(f"Serve refused the configuration: {error.read().decode()}") from None

    def _details(self) -> dict[str, Any]:
        with urlopen(f"{self.dashboard_url}{_API}", timeout=_REQUEST_TIMEOUT_S) as answer:
            details: dict[str, Any] = json.load(answer)
            return details

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            log = (self._directory / _START_LOG).read_text(errors="replace")
            raise ClusterError(f"ray start ended with {self._process.returncode}:\n{log[-2000:]}")
        try:
            self._details()
        except OSError:
            return False
        return True

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise ClusterError(f"{what}: not there after {timeout_s:.0f} s")
            time.sleep(_POLL_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _free_span() -> int:
    """First of `_PORTS_PER_CLUSTER` ports of which none is in use.

    At random, so that clusters that start at the same time hardly ever meet; if they do, Serve skips a port
    that is taken.
    """
    spans = list(range(_INGRESS_PORTS.start, _INGRESS_PORTS.stop, _PORTS_PER_CLUSTER))
    random.shuffle(spans)
    used = {connection.laddr.port for connection in psutil.net_connections("tcp") if connection.laddr}
    for first in spans:
        if used.isdisjoint(range(first, first + _PORTS_PER_CLUSTER)):
            return first
    raise ClusterError(f"no {_PORTS_PER_CLUSTER} free ports in a row within {_INGRESS_PORTS}")
