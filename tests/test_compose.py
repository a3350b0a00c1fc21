"""docker-compose.yml and deploy/, by compose's own reading and by the programs that their parts are for.

No container runs here: what containers would run is run as it is, from the same files.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from demo.ports import free_port
from demo.wait import wait_until
from extproc import config as configuration
from extproc.address import split_address
from extproc.core.router import Router
from extproc.eds import EndpointDiscovery
from extproc.picker import EndpointPicker
from extproc.server import Server, ServerSettings
from serve_app import direct_ingress
from serve_app.app import DEPLOYMENT
from serve_app.cluster import RayCluster
from serve_app.settings import AppSettings
from tests.support.envoy import ENVOY, Envoy

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
SERVE = Path(sys.executable).with_name("serve")

Services = dict[str, dict[str, Any]]


def compose(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [str(ROOT / "make" / "compose.sh"), *map(str, arguments)]
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def services() -> Services:
    """The services as compose understands them."""
    read = compose("config", "--format", "json")
    assert read.returncode == 0, read.stderr
    found: Services = json.loads(read.stdout)["services"]
    return found


@pytest.fixture(scope="module")
def router() -> configuration.Config:
    return configuration.load(DEPLOY / "router.toml", {})


def test_compose_refuses_what_it_should(tmp_path: Path) -> None:
    broken = tmp_path / "docker-compose.yml"
    broken.write_text("services: {envoy: {image: envoy, depends_on: [nobody]}}", encoding="utf-8")
    assert compose("--file", broken, "config", "--quiet").returncode != 0


def test_every_mounted_file_is_there(services: Services) -> None:
    mounts = [mount for service in services.values() for mount in service.get("volumes", ())]
    sources = {Path(mount["source"]) for mount in mounts if mount["type"] == "bind"}
    files = {path for path in DEPLOY.rglob("*") if path.is_file()}
    assert sources == files - {DEPLOY / "ready.py", DEPLOY / "prometheus" / "alerts_test.yml"}


def test_services_find_each_other(services: Services, router: configuration.Config) -> None:
    host, port = split_address(router.envoy.router)
    assert host in services
    assert port == split_address(router.server.listen)[1]
    assert services[host]["healthcheck"]["test"][-1] == f"127.0.0.1:{port}"

    host, port = split_address(router.membership.ray_serve_url.removeprefix("http://"))
    assert [each["target"] for each in services[host]["ports"]] == [port]
    assert f"--address {router.membership.ray_serve_url} " in " ".join(services["application"]["command"])

    assert [each["target"] for each in services["envoy"]["ports"]] == [split_address(router.envoy.listen)[1]]


def test_all_spans_go_to_the_collector_and_on_to_jaeger(services: Services, router: configuration.Config) -> None:
    collector = yaml.safe_load((DEPLOY / "collector.yml").read_text(encoding="utf-8"))
    host, port = split_address(router.envoy.otlp)
    assert host in services
    assert split_address(collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"])[1] == port
    assert router.telemetry.exporter == "otlp"
    assert services["extproc"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == f"http://{router.envoy.otlp}"
    application = yaml.safe_load((DEPLOY / "serve.yaml").read_text(encoding="utf-8"))["applications"][0]
    assert application["args"]["otlp_traces_endpoint"] == f"http://{router.envoy.otlp}/v1/traces"

    traces = collector["service"]["pipelines"]["traces"]
    for kind in ("receivers", "processors", "exporters"):
        assert set(traces[kind]) == set(collector[kind])
    (exporter,) = collector["exporters"].values()
    assert split_address(exporter["endpoint"])[0] in services


def test_prometheus_scrapes_the_router_and_grafana_asks_prometheus(
    services: Services, router: configuration.Config
) -> None:
    (scrape,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    (target,) = scrape["static_configs"][0]["targets"]
    host, port = split_address(target)
    assert host in services
    assert port == split_address(router.admin.listen)[1] == services[host]["ports"][0]["target"]

    sources = yaml.safe_load((DEPLOY / "grafana" / "datasources.yml").read_text(encoding="utf-8"))["datasources"]
    assert {urlsplit(source["url"]).hostname for source in sources} <= set(services)
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} <= {source["uid"] for source in sources}
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yml").read_text(encoding="utf-8"))["providers"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in {mount["target"] for mount in services["grafana"]["volumes"]}
    assert home.startswith(provider["options"]["path"])


def test_each_image_is_ours_or_of_an_exact_release(services: Services) -> None:
    for service in services.values():
        assert "build" in service or re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])


def test_nothing_is_published_beyond_this_host(services: Services) -> None:
    assert {each["host_ip"] for service in services.values() for each in service.get("ports", ())} == {"127.0.0.1"}


def test_envoy_is_the_release_the_tests_run_on(services: Services) -> None:
    version = subprocess.run([ENVOY, "--version"], capture_output=True, text=True, check=True).stdout
    (release,) = re.findall(r"/(\d+\.\d+\.\d+)/", version)
    assert services["envoy"]["image"] == f"envoyproxy/envoy:v{release}"


def test_the_router_is_given_time_to_leave(services: Services, router: configuration.Config) -> None:
    grace_s = float(services["extproc"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > router.server.notice_s + router.server.drain_s


def test_ray_is_started_with_direct_ingress(services: Services) -> None:
    environment = services["ray"]["environment"]
    assert direct_ingress.environment(30000, 999, 5).items() <= environment.items()


def test_serve_accepts_the_application() -> None:
    deploy = ServeDeploySchema.model_validate(yaml.safe_load((DEPLOY / "serve.yaml").read_text(encoding="utf-8")))
    (application,) = deploy.applications
    assert application.import_path == "serve_app.app:build"
    assert [deployment.name for deployment in application.deployments] == [DEPLOYMENT]
    assert AppSettings.model_validate(application.args).engine == "sim"
    # Envoy comes from another container.
    assert deploy.http_options.host == "0.0.0.0"


def test_images_are_built_from_files_that_are_there() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    let_through = {
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")
    }
    sources = [word for line in re.findall(r"^COPY (.+) \S+$", dockerfile, re.M) for word in line.split()]
    assert sources
    for source in sources:
        assert (ROOT / source).exists()
        assert source.partition("/")[0] in let_through


def test_nothing_runs_as_root(services: Services) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    stages = dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM|\Z)", dockerfile, re.M | re.S))
    for service in services.values():
        target = service.get("build", {}).get("target")
        assert int(service["user"].partition(":")[0]) > 0 if target is None else "\nUSER 1000\n" in stages[target]


@pytest.mark.e2e
def test_envoy_accepts_what_the_bootstrap_service_renders(services: Services, tmp_path: Path) -> None:
    inside = {mount["target"]: mount for mount in services["bootstrap"]["volumes"]}
    command = [
        str(tmp_path / Path(word).name)
        if Path(word).parent == Path("/bootstrap")
        else inside.get(word, {}).get("source", word)
        for word in services["bootstrap"]["command"]
    ]
    subprocess.run([sys.executable, "-m", "extproc", *command], cwd=tmp_path, check=True)
    rendered = tmp_path / Path(services["envoy"]["command"][2]).name
    checked = subprocess.run(
        [ENVOY, "--mode", "validate", "-c", rendered, "--disable-hot-restart"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr


@pytest.mark.e2e
def test_the_health_check_of_envoy(services: Services, tmp_path: Path) -> None:
    with Envoy(tmp_path, f"127.0.0.1:{free_port()}") as envoy:
        _, *argv = services["envoy"]["healthcheck"]["test"]
        script = argv[-1].replace("/9901", f"/{split_address(envoy.settings.admin)[1]}")
        assert script != argv[-1]
        assert subprocess.run([*argv[:-1], script], timeout=10, check=False).returncode == 0
    assert subprocess.run([*argv[:-1], script], timeout=10, check=False).returncode != 0


async def test_the_health_check_of_the_router() -> None:
    server = Server(ServerSettings("127.0.0.1:0", notice_s=0, drain_s=0), EndpointPicker(Router()), EndpointDiscovery())
    address = await server.start()
    try:
        assert await _ready(address) == 1
        server.set_ready(True)
        assert await _ready(address) == 0
    finally:
        await server.stop()
    assert await _ready(address) == 1


async def _ready(address: str) -> int:
    process = await asyncio.create_subprocess_exec(
        sys.executable, DEPLOY / "ready.py", address, stderr=asyncio.subprocess.DEVNULL
    )
    return await asyncio.wait_for(process.wait(), 20)


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with RayCluster.start() as cluster:
        yield cluster


@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_the_application_listens_for_other_containers(cluster: RayCluster, tmp_path: Path) -> None:
    document = yaml.safe_load((DEPLOY / "serve.yaml").read_text(encoding="utf-8"))
    document["http_options"]["port"] = free_port()  # of Serve's proxy, whose default may be taken on a machine
    config = tmp_path / "serve.yaml"
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    deployed = subprocess.run(
        [SERVE, "deploy", "--address", cluster.dashboard_url, config],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert deployed.returncode == 0, deployed.stderr
    wait_until(lambda: len(cluster.replicas()) == 4, "four replicas", 90)
    for replica in cluster.replicas():
        # Bound to 127.0.0.1 only, a replica would refuse its neighbour's address.
        elsewhere = f"127.0.0.2:{split_address(replica.endpoint)[1]}"
        with urllib.request.urlopen(f"http://{elsewhere}/v1/models", timeout=10) as answer:
            assert answer.headers["x-replica-id"] == replica.id
