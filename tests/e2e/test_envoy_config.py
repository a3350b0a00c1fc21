"""Every bootstrap that the configuration can ask for is one that Envoy accepts."""

from __future__ import annotations

import itertools
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from extproc.core.settings import FeatureSettings
from extproc.envoy_config import EnvoySettings, render
from extproc.messages import READ_HEADERS
from tests.support.envoy import ENVOY

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e


def http(bootstrap: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    return found["typed_config"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("values", list(itertools.product([False, True], repeat=4)))
def test_envoy_accepts_it(tmp_path: Path, values: tuple[bool, ...]) -> None:
    response_headers, round_robin_route, access_log, tracing = values
    settings = EnvoySettings(
        router="router.example:50051",
        response_headers=response_headers,
        round_robin_route=round_robin_route,
        access_log=access_log,
        otlp="collector.example:4318" if tracing else "",
    )
    path = tmp_path / "envoy.yaml"
    path.write_text(render(settings, "0.0.0.0:50051", FeatureSettings(), sample_ratio=0.25))
    validated = subprocess.run([ENVOY, "--mode", "validate", "-c", path], capture_output=True, text=True, check=False)
    assert validated.returncode == 0, validated.stderr
    assert "deprecated" not in validated.stderr.lower()


def test_the_router_is_reached_where_it_listens_unless_told_otherwise() -> None:
    for settings, host in ((EnvoySettings(), "127.0.0.9"), (EnvoySettings(router="name.example:1"), "name.example")):
        bootstrap = yaml.safe_load(render(settings, "127.0.0.9:50051", FeatureSettings()))
        (router,) = (cluster for cluster in bootstrap["static_resources"]["clusters"] if cluster["name"] == "extproc")
        endpoint = router["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
        assert endpoint["address"]["socket_address"]["address"] == host


def test_what_is_switched_off_is_left_out() -> None:
    bootstrap = yaml.safe_load(render(EnvoySettings(), "127.0.0.1:50051", FeatureSettings()))
    routes = http(bootstrap)["route_config"]["virtual_hosts"][0]["routes"]
    assert [route["name"] for route in routes] == ["upgrade", "upload", "affinity"]
    assert [cluster["name"] for cluster in bootstrap["static_resources"]["clusters"]] == ["fleet", "extproc"]
    assert not http(bootstrap)["access_log"]
    assert "tracing" not in http(bootstrap)


def test_nothing_is_left_to_fill_in() -> None:
    assert "${" not in render(EnvoySettings(round_robin_route=True), "127.0.0.1:50051", FeatureSettings())


def test_the_fallback_hashes_both_spellings_of_each_session_header() -> None:
    features = FeatureSettings(session_headers=("x-session-id", "conversation_id"))
    bootstrap = yaml.safe_load(render(EnvoySettings(), "127.0.0.1:50051", features))
    policy = http(bootstrap)["route_config"]["virtual_hosts"][0]["routes"][-1]["route"]["hash_policy"]
    assert [each["header"]["header_name"] for each in policy] == [
        "x-session-id",
        "x_session_id",
        "conversation-id",
        "conversation_id",
    ]
    assert all(each["terminal"] for each in policy)


@pytest.mark.parametrize("address", ["", "localhost", ":8080", "host:", "host:http", "8080"])
def test_an_address_that_is_none_is_an_error(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        render(EnvoySettings(listen=address), "127.0.0.1:50051", FeatureSettings())


def test_envoy_shows_what_the_router_reads_and_nothing_else() -> None:
    features = FeatureSettings(session_headers=("x_mine",), tenant_header="x-org", credential_headers=("x-key",))
    bootstrap = yaml.safe_load(render(EnvoySettings(), "127.0.0.1:50051", features))
    (ext_proc,) = (each for each in http(bootstrap)["http_filters"] if each["name"].endswith("ext_proc"))
    (pattern,) = ext_proc["typed_config"]["forward_rules"]["allowed_headers"]["patterns"]
    shown = re.compile(pattern["safe_regex"]["regex"])
    for name in (*READ_HEADERS, "x-mine", "x_mine", "x-org", "x_org", "x-key", "x_key"):
        assert shown.fullmatch(name)
    for name in ("cookie", "authorization", "x-mine-too", "my-x-mine", "xmine", "x.mine", ""):
        assert not shown.fullmatch(name)
