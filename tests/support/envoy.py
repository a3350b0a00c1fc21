"""A real Envoy in front of a router and a fleet."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from demo.ports import free_ports
from demo.process import Process
from demo.wait import wait_until
from extproc.address import split_address
from extproc.core.settings import FeatureSettings
from extproc.envoy_config import EnvoySettings, render, render_secrets

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ENVOY = Path(sys.executable).with_name("envoy")


class Envoy(Process):
    """Envoy on free ports, with the bootstrap that the product renders."""

    def __init__(
        self,
        directory: Path,
        router: str,
        settings: EnvoySettings | None = None,
        features: FeatureSettings | None = None,
        body_mode: str = "BUFFERED",
        sample_ratio: float = 1.0,
        more_routers: Sequence[str] = (),
        threads: int = 1,
    ) -> None:
        listen, admin = free_ports(2)
        self.settings = replace(
            settings or EnvoySettings(), listen=f"127.0.0.1:{listen}", admin=f"127.0.0.1:{admin}", router=router
        )
        self.url = f"http://{self.settings.listen}"
        self._admin = f"http://{self.settings.admin}"
        bootstrap = directory / "envoy.yaml"
        rendered = render(self.settings, router, features or FeatureSettings(), sample_ratio, directory)
        if body_mode != "BUFFERED":  # as other data planes are configured
            mode = f"request_body_mode: {body_mode}, request_trailer_mode: SEND"
            rendered = rendered.replace("request_body_mode: BUFFERED", mode.replace(", ", "\n" + " " * 16))
        if more_routers:  # as a name with several addresses gives them
            rendered = _with_routers(rendered, more_routers)
        bootstrap.write_text(rendered, encoding="utf-8")
        for name, secret in render_secrets(self.settings).items():
            (directory / name).write_text(secret, encoding="utf-8")
        super().__init__(
            # Hot restart would let two Envoys of one machine meet in a shared memory segment.
            [ENVOY, "-c", bootstrap, "--concurrency", str(threads), "--disable-hot-restart", "--log-level", "warning"],
            directory / "envoy.log",
        )
        self.wait_ready(lambda: "LIVE" in self.admin("/ready"), "envoy is live")

    def admin(self, path: str) -> str:
        """The admin interface's answer; empty while it does not listen."""
        try:
            with urllib.request.urlopen(self._admin + path, timeout=5) as answer:
                text: str = answer.read().decode()
                return text
        except (urllib.error.URLError, ConnectionError):
            return ""

    def endpoints(self) -> set[str]:
        """What the fleet cluster holds: "ip:port"."""
        lines = (line.split("::") for line in self.admin("/clusters").splitlines())
        return {words[1] for words in lines if len(words) > 2 and words[0] == "fleet" and "cx_active" in words[2]}

    def sees_router(self) -> bool:
        """Whether the router passes its health check."""
        lines = self.admin("/clusters").splitlines()
        return any(line.startswith("extproc::") and line.endswith("::health_flags::healthy") for line in lines)

    def wait_for_router(self, endpoints: Iterable[str], timeout_s: float = 20.0) -> None:
        """Wait until exactly these endpoints are known and the router is asked."""
        expected = set(endpoints)
        wait_until(
            lambda: self.sees_router() and self.endpoints() == expected,
            f"envoy knows {sorted(expected)} and a healthy router",
            timeout_s,
        )

    def stat(self, name: str) -> int:
        """One counter or gauge; 0 where Envoy has not made it yet."""
        for line in self.admin(f"/stats?filter={name}").splitlines():
            key, _, value = line.partition(": ")
            if key == name:
                return int(value)
        return 0


def _with_routers(rendered: str, routers: Iterable[str]) -> str:
    bootstrap = yaml.safe_load(rendered)
    cluster = next(each for each in bootstrap["static_resources"]["clusters"] if each["name"] == "extproc")
    for router in routers:
        host, port = split_address(router)
        address = {"socket_address": {"address": host, "port_value": port}}
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"].append({"endpoint": {"address": address}})
    return str(yaml.safe_dump(bootstrap))
