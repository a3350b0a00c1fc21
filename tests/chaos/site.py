"""What the faults happen to: a real Envoy, `extproc serve`, and simulated engines, each a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from demo.ports import free_port
from demo.process import Process
from demo.stack import toml
from demo.wait import until
from tests.chaos.relay import Relay
from tests.component.serving import SERVE
from tests.support.envoy import Envoy
from tests.support.metrics import figure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from tests.chaos.load import Load

Sections = dict[str, dict[str, Any]]

REPLICAS = 4
STAY_HOME = {"tie_tokens": 1e9}
"""Load moves sessions, too. Here it never weighs enough to, so that every move is the fault's."""
STARTING_S = 60.0
"""Time for a process to come up on a busy machine; a healthy one takes one or two seconds."""


@dataclass
class Replica:
    """A simulated engine, and the relay through which everybody reaches it."""

    id: str
    directory: Path
    port: int = field(default_factory=free_port)
    relay: Relay = field(init=False)
    process: Process = field(init=False)

    def __post_init__(self) -> None:
        self.relay = Relay(f"127.0.0.1:{self.port}")

    def start(self) -> None:
        argv = [sys.executable, "-m", "serve_app.engine", "--port", str(self.port), "--replica-id", self.id]
        self.process = Process(argv, self.directory / f"replica-{self.id}.log")

    async def answers(self) -> bool:
        return await asyncio.to_thread(_get, f"http://127.0.0.1:{self.port}/health") is not None

    async def wait(self) -> None:
        await until(self.answers, f"replica {self.id} answers", STARTING_S)


@dataclass
class Router:
    """`extproc serve`, and the relay between it and Envoy. It may be started again and keeps its addresses.

    shell: what a shell does for it before it starts, such as "ulimit -n 64"; "$@" is the command line.
    """

    directory: Path
    sections: Sections
    env: Mapping[str, str] = field(default_factory=dict)
    shell: str = 'exec "$@"'
    name: str = "router"
    port: int = field(default_factory=free_port)
    admin_port: int = field(default_factory=free_port)
    relay: Relay = field(init=False)
    process: Process = field(init=False)

    def __post_init__(self) -> None:
        self.relay = Relay(f"127.0.0.1:{self.port}")
        self.sections = {
            "server": {"listen": f"127.0.0.1:{self.port}", **self.sections.get("server", {})},
            "admin": {"listen": f"127.0.0.1:{self.admin_port}"},
            **{name: keys for name, keys in self.sections.items() if name != "server"},
        }

    def start(self) -> None:
        file = self.directory / f"{self.name}.toml"
        file.write_text(toml(self.sections), encoding="utf-8")
        argv = ["sh", "-c", self.shell, "sh", *SERVE, "--config", file]
        self.process = Process(argv, self.directory / f"{self.name}.log", self.env)

    async def page(self, path: str) -> str | None:
        """A page of the admin port; None where there is no answer, or a bad one."""
        return await asyncio.to_thread(_get, f"http://127.0.0.1:{self.admin_port}{path}")

    async def is_ready(self) -> bool:
        return await self.page("/readyz") is not None

    async def wait(self) -> None:
        await until(self.is_ready, f"{self.name} is ready", STARTING_S)

    async def metric(self, name: str, **labels: str) -> float:
        return figure(await self.page("/metrics") or "", name, **labels)

    async def wait_for_metric(self, name: str, value: float, timeout_s: float = 20.0, **labels: str) -> None:
        async def reached() -> bool:
            return await self.metric(name, **labels) == value

        await until(reached, f"{name}{labels or ''} is {value}", timeout_s)


Announce = Callable[[Iterable[Replica]], None]


@dataclass
class Site:
    """Everything that one fault looks at."""

    directory: Path
    envoy: Envoy
    routers: list[Router]
    replicas: list[Replica]
    stack: AsyncExitStack
    announce: Announce

    @property
    def router(self) -> Router:
        return self.routers[0]

    def busiest(self, load: Load) -> Replica:
        """The home of most sessions: where there are none, a fault would show nothing."""
        ((id_, _),) = Counter(load.homes().values()).most_common(1)
        return next(replica for replica in self.replicas if replica.id == id_)

    async def add_replica(self, id_: str, start: bool = True) -> Replica:
        """One more; nobody is told of it."""
        replica = await _add_replica(self.stack, Replica(id_, self.directory))
        if start:
            replica.start()
            await replica.wait()
        return replica

    async def wait_routed(self) -> None:
        """Wait until Envoy finds every router well."""

        async def routed() -> bool:
            lines = (await asyncio.to_thread(self.envoy.admin, "/clusters")).splitlines()
            flags = [
                line.rpartition("::")[2] for line in lines if line.startswith("extproc::") and "health_flags" in line
            ]
            return flags == ["healthy"] * len(self.routers)

        await until(routed, "envoy finds every router well", STARTING_S)


@asynccontextmanager
async def site(
    directory: Path,
    sections: Sections | None = None,
    env: Mapping[str, str] | None = None,
    shell: str = 'exec "$@"',
    routers: int = 1,
    announce: Announce | None = None,
    envoy_threads: int = 1,
) -> AsyncIterator[Site]:
    """Start it and wait until requests are routed; end all of it.

    sections, env, shell: the routers' own. announce: tells them who the members are; by default in the file that they
    watch.
    """
    announce = announce or partial(write_fleet, directory / "fleet.json")
    async with AsyncExitStack() as stack:
        fleet = [await _add_replica(stack, Replica(f"r{number}", directory)) for number in range(REPLICAS)]
        for replica in fleet:
            replica.start()
        membership = {"source": "file", "file": str(directory / "fleet.json"), "poll_s": 0.1}
        given: Sections = {"membership": membership, **(sections or {})}
        given["routing"] = {**STAY_HOME, **given.get("routing", {})}
        instances = [Router(directory, given, env or {}, shell, f"router-{number}") for number in range(routers)]
        for router in instances:
            await stack.enter_async_context(router.relay.running())
            router.start()
            stack.push_async_callback(_end, router)
        first, *more = (router.relay.address for router in instances)
        envoy = await asyncio.to_thread(Envoy, directory, first, more_routers=more, threads=envoy_threads)
        stack.push_async_callback(asyncio.to_thread, envoy.stop)
        running = Site(directory, envoy, instances, fleet, stack, announce)
        for replica in fleet:
            await replica.wait()
        announce(fleet)
        for router in instances:
            await router.wait()
        endpoints = [replica.relay.address for replica in fleet]
        await asyncio.to_thread(envoy.wait_for_router, endpoints, STARTING_S)
        await running.wait_routed()
        yield running


def write_fleet(file: Path, replicas: Iterable[Replica]) -> None:
    """As a membership file, whole at any moment."""
    entries = [{"id": replica.id, "endpoint": replica.relay.address} for replica in replicas]
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"replicas": entries}))
    new.replace(file)


async def _add_replica(stack: AsyncExitStack, replica: Replica) -> Replica:
    await stack.enter_async_context(replica.relay.running())
    stack.push_async_callback(_end, replica)
    return replica


async def _end(what: Replica | Router) -> None:
    """The process that is running then; the router's polite end takes seconds, and has a test of its own."""
    await asyncio.to_thread(what.process.kill)


def _get(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            text: str = answer.read().decode()
            return text
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None
