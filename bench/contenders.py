"""Those who are compared: each a way to put one address in front of several backends.

extproc          Envoy and this router, as `extproc envoy-config` and the defaults have them, compiled as in its image
interpreted      the same from its sources, as Python runs them
grpcio           that on grpcio's core (server.transport)
reading          the first, with every body read (features.unread_from_bytes = 0)
extproc@256      the first before so many replicas
workers          the first with two workers, and two threads of Envoy, whose connections they share
floor            the same Envoy, and a picker that reads nothing and decides nothing (bench/floor.py)
grpcio-floor     the same picker on grpcio's core
envoy            Envoy alone: a ring hash on the session header
smg, vllm-router, sglang-router    each with its cache-aware policy, from its package on PyPI
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self

from bench import usage
from bench.backends import answers, socket_address
from demo.ports import free_port, free_ports
from demo.process import Process
from demo.stack import ENVOY, EXTPROC

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

BACKENDS: Final = 4
SAMPLED: Final = 0.01
"""Share of the requests that leave a span."""
COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "smg": ("smg", "launch"),
    "vllm-router": ("vllm-router",),
    "sglang-router": ("sglang-router", "launch"),
}
BY_GRPCIO: Final = {"EXTPROC_SERVER__TRANSPORT": "grpcio"}
READ_ALL: Final = {"EXTPROC_FEATURES__UNREAD_FROM_BYTES": "0"}
ROOT: Final = Path(__file__).parent.parent
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefix-affinity-router"


class Contender:
    """One that runs. url: where clients send. Leaving the context ends its processes."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory / name
        self.directory.mkdir()
        self.url = ""
        self._processes: dict[str, Process] = {}
        self._exit = ExitStack()

    def run(self, role: str, argv: Sequence[str | Path], env: dict[str, str] | None = None) -> Process:
        process = Process(argv, self.directory / f"{role}.log", env)
        self._exit.callback(process.stop)
        self._processes[role] = process
        return process

    def cpu_s(self) -> dict[str, float]:
        """By process, so far; those that it has started stand beside it."""
        used = {role: usage.cpu_s(process.pid) for role, process in self._processes.items()}
        for role, process in self._processes.items():
            if children := usage.cpu_s_of_children(process.pid):
                used[role] -= children
                used[f"{role}'s children"] = children
        return used

    def peak_rss_bytes(self) -> int:
        return sum(usage.peak_rss_bytes(process.pid) for process in self._processes.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()


def replicas_of(name: str) -> int:
    """How many backends a contender has."""
    _, _, count = name.partition("@")
    return int(count) if count else BACKENDS


def start(name: str, directory: Path, backends: Sequence[str]) -> Contender:
    """Start one and wait until it routes. Raises ValueError for an unknown name, RuntimeError where it does not run."""
    kind = name.partition("@")[0]
    starters: dict[str, Callable[[Contender, Sequence[str]], None]] = {
        "extproc": lambda contender, backends: _start_extproc(contender, backends, compiled()),
        "interpreted": lambda contender, backends: _start_extproc(contender, backends, ROOT),
        "grpcio": lambda contender, backends: _start_extproc(contender, backends, ROOT, env=BY_GRPCIO),
        "reading": lambda contender, backends: _start_extproc(contender, backends, compiled(), env=READ_ALL),
        "workers": lambda contender, backends: _start_extproc(contender, backends, compiled(), workers=2),
        "floor": _start_floor,
        "grpcio-floor": _start_grpcio_floor,
        "envoy": _start_envoy,
        **dict.fromkeys(COMMANDS, _start_peer),
    }
    if kind not in starters:
        raise ValueError(f"{name} is none of {', '.join(starters)}")
    contender = Contender(name, directory)
    try:
        starters[kind](contender, backends[: replicas_of(name)])
    except BaseException:
        contender.__exit__()
        raise
    return contender


@dataclass(frozen=True, slots=True)
class Front:
    """Where a router and the Envoy before it are to listen, and the configuration file that says so."""

    config: Path
    router: str
    envoy_admin: str
    env: dict[str, str]


@cache
def compiled() -> Path:
    """The folder from which the compiled `extproc` is imported, up to date. Raises subprocess.CalledProcessError."""
    subprocess.run(["make", "--silent", "compiled"], cwd=ROOT, stdout=sys.stderr, check=True)
    return ROOT / "build" / "compiled"


def _imported_from(package: Path) -> dict[str, str]:
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(package)}


def _start_extproc(
    contender: Contender,
    backends: Sequence[str],
    package: Path,
    workers: int = 1,
    env: Mapping[str, str] = MappingProxyType({}),
) -> None:
    front = _configure(contender, backends)
    environment = {**front.env, **_imported_from(package), **env}
    argv: list[str | Path] = [*EXTPROC, "serve", "--config", front.config, "--workers", str(workers)]
    router = contender.run("router", argv, environment)
    router.wait_ready(lambda: "membership changed" in router.log(), "the router knows its fleet")
    if workers > 1:
        router.wait_ready(lambda: router.log().count("worker serving") == workers, "all workers serve")
    _start_envoy_before(contender, front, threads=workers)


def _start_grpcio_floor(contender: Contender, backends: Sequence[str]) -> None:
    _start_floor(contender, backends, "grpcio")


def _start_floor(contender: Contender, backends: Sequence[str], transport: str = "http2") -> None:
    front = _configure(contender, backends)
    argv = [sys.executable, "-m", "bench.floor", front.router, backends[0], transport]
    contender.run("router", argv, _imported_from(compiled()))
    _start_envoy_before(contender, front)


def _configure(contender: Contender, backends: Sequence[str]) -> Front:
    router, listen, admin, metrics, collector = (f"127.0.0.1:{port}" for port in free_ports(5))
    contender.url = f"http://{listen}"
    config = contender.directory / "router.toml"
    replicas = "".join(f'[[membership.replicas]]\nendpoint = "{each}"\n' for each in backends)
    config.write_text(
        f'[server]\nlisten = "{router}"\n[admin]\nlisten = "{metrics}"\n[telemetry]\nexporter = "otlp"\n'
        f'sample_ratio = {SAMPLED}\n[envoy]\nlisten = "{listen}"\nadmin = "{admin}"\n'
        f'[membership]\nsource = "static"\n{replicas}'
    )
    # Nobody collects: what is measured is making spans, not keeping them.
    return Front(config, router, admin, {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector}"})


def _start_envoy_before(contender: Contender, front: Front, threads: int = 1) -> None:
    """Envoy, with what the configuration says of it, once it finds the router well."""
    bootstrap = contender.directory / "envoy.yaml"
    subprocess.run([*EXTPROC, "envoy-config", "--config", front.config, "-o", bootstrap], check=True)
    envoy = _run_envoy(contender, bootstrap, threads)

    def asks() -> bool:
        lines = _get(f"http://{front.envoy_admin}/clusters").splitlines()
        known = any(line.startswith("fleet::127") for line in lines)
        return known and any(line.startswith("extproc::") and line.endswith("::healthy") for line in lines)

    envoy.wait_ready(asks, "Envoy asks the router", 30.0)


def _start_envoy(contender: Contender, backends: Sequence[str]) -> None:
    port = free_port()
    contender.url = f"http://127.0.0.1:{port}"
    bootstrap = contender.directory / "envoy.json"
    bootstrap.write_text(json.dumps(_ring_hash(port, free_port(), backends)), encoding="utf-8")
    _run_envoy(contender, bootstrap).wait_ready(lambda: answers(f"{contender.url}/health"), "Envoy answers")


def _run_envoy(contender: Contender, bootstrap: Path, threads: int = 1) -> Process:
    argv: list[str | Path] = [
        ENVOY,
        "-c",
        bootstrap,
        "--concurrency",
        str(threads),
        "--disable-hot-restart",
        "--log-level",
        "error",
    ]
    return contender.run("envoy", argv)


def _start_peer(contender: Contender, backends: Sequence[str]) -> None:
    command, *verb = COMMANDS[contender.name]
    port, metrics = free_ports(2)
    contender.url = f"http://127.0.0.1:{port}"
    argv: list[str | Path] = [installed(contender.name) / command, *verb, "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--worker-urls", *(f"http://{each}" for each in backends), "--policy", "cache_aware"]
    argv += ["--prometheus-port", str(metrics), "--log-level", "error"]
    process = contender.run("router", argv)
    process.wait_ready(lambda: _completes(contender.url), "it completes a chat", 60.0)


def installed(peer: str) -> Path:
    """The bin/ of a peer's own environment, which is made where it is missing, and kept."""
    venv = CACHE / f"peer-{peer}"
    if not (venv / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        quiet = ("install", "--quiet", "--disable-pip-version-check")
        subprocess.run([venv / "bin" / "pip", *quiet, peer], check=True, stdout=sys.stderr)
        (venv / "complete").touch()
    return venv / "bin"


def _completes(url: str) -> bool:
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    return '"choices"' in _get(f"{url}/v1/chat/completions", json.dumps(chat).encode())


def _get(url: str, body: bytes | None = None) -> str:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            text: str = answer.read().decode()
            return text
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return ""


def _ring_hash(port: int, admin_port: int, backends: Sequence[str]) -> dict[str, Any]:
    """Envoy by itself: sessions stick by their header."""
    extensions = "type.googleapis.com/envoy.extensions"
    route = {"cluster": "fleet", "hash_policy": [{"header": {"header_name": "x-session-id"}}]}
    manager = {
        "@type": f"{extensions}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "http_filters": [{"name": "router", "typed_config": {"@type": f"{extensions}.filters.http.router.v3.Router"}}],
        "route_config": {
            "virtual_hosts": [
                {"name": "fleet", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}
            ]
        },
    }
    endpoints = [{"endpoint": {"address": socket_address(int(each.rpartition(":")[2]))}} for each in backends]
    return {
        "admin": {"address": socket_address(admin_port)},
        "static_resources": {
            "listeners": [
                {
                    "name": "clients",
                    "address": socket_address(port),
                    "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
                }
            ],
            "clusters": [
                {
                    "name": "fleet",
                    "type": "STATIC",
                    "lb_policy": "RING_HASH",
                    "load_assignment": {"cluster_name": "fleet", "endpoints": [{"lb_endpoints": endpoints}]},
                }
            ],
        },
    }
