"""Configuration: what a file and the environment make of the defaults, and how their errors are told."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING

import pytest

from extproc.config import Config, ConfigError, load, to_json
from extproc.core.settings import PolicyName
from extproc.feeds.static import StaticReplica
from extproc.membership import Source
from extproc.telemetry import Exporter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

STATIC = '[membership]\nsource = "static"\n'


@pytest.fixture
def errors(tmp_path: Path) -> Callable[..., list[str]]:
    """Every error of a configuration; the file is called FILE in them."""

    def errors(text: str, **environment: str) -> list[str]:
        path = tmp_path / "extproc.toml"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            load(path, environment)
        assert str(caught.value) == "\n".join(caught.value.errors)
        return [line.replace(str(path), "FILE") for line in caught.value.errors]

    return errors


def of_file(tmp_path: Path, text: str, environment: Mapping[str, str]) -> Config:
    path = tmp_path / "extproc.toml"
    path.write_text(text, encoding="utf-8")
    return load(path, environment)


def test_nothing_need_be_said() -> None:
    assert load(environment={}) == Config()


def test_a_file_sets_keys_of_every_section(tmp_path: Path) -> None:
    config = of_file(
        tmp_path,
        """
        [server]
        listen = "[::1]:0"
        [membership]
        source = "static"
        replicas = [{endpoint = "a:1", weight = 2, models = ["m", "n"]}, {endpoint = "b:1", id = "second"}]
        [health]
        path = "/health"
        [load]
        enabled = false
        [features]
        session_headers = ["X_Conversation"]
        [routing]
        policy = "bounded_load"
        bounded_load_factor = 2
        [telemetry]
        exporter = "otlp"
        [envoy]
        retries = 0
        """,
        {},
    )
    assert config.server.listen == "[::1]:0"
    assert config.membership.source is Source.STATIC
    assert config.membership.replicas == (
        StaticReplica("a:1", weight=2.0, models=("m", "n")),
        StaticReplica("b:1", id="second"),
    )
    assert config.health.path == "/health"
    assert config.load.enabled is False
    assert config.features.session_headers == ("x-conversation",)
    assert config.routing.policy is PolicyName.BOUNDED_LOAD
    assert config.routing.bounded_load_factor == 2.0
    assert config.telemetry.exporter is Exporter.OTLP
    assert config.envoy.retries == 0
    defaults = Config()
    assert config.routing.saturation_in_flight == defaults.routing.saturation_in_flight
    assert config.membership.poll_s == defaults.membership.poll_s


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    config = of_file(
        tmp_path,
        STATIC + 'replicas = [{endpoint = "a:1"}]\npoll_s = 2\n[routing]\nsaturation_in_flight = 8\nvnodes = 32\n',
        {
            "EXTPROC_MEMBERSHIP__REPLICAS": '[{"endpoint": "b:1", "models": ["m"]}]',
            "EXTPROC_MEMBERSHIP__WEIGHTS": '{"app": 0.5}',
            "EXTPROC_ROUTING__SATURATION_IN_FLIGHT": "4",
            "EXTPROC_ROUTING__SHED": "true",
            "EXTPROC_TELEMETRY__EXPORTER": "console",
            "EXTPROC_FEATURES__MASK": '["date"]',
        },
    )
    assert config.membership.replicas == (StaticReplica("b:1", models=("m",)),)
    assert config.membership.weights == {"app": 0.5}
    assert config.membership.poll_s == 2.0
    assert config.routing.saturation_in_flight == 4
    assert config.routing.vnodes == 32
    assert config.routing.shed is True
    assert config.telemetry.exporter is Exporter.CONSOLE
    assert config.features.mask == ("date",)


@pytest.mark.parametrize("text", ["123", "true", "null", "1.5", "a b"])
def test_a_variable_for_a_text_is_taken_as_text(text: str) -> None:
    assert load(environment={"EXTPROC_FEATURES__SECRET": text}).features.secret == text


def test_variables_that_are_not_ours_are_left_alone() -> None:
    """Kubernetes sets the first two in every pod beside a service that is called extproc."""
    environment = {"EXTPROC_PORT": "tcp://10.0.0.1:50051", "EXTPROC_SERVICE_HOST": "10.0.0.1", "OTHER__KEY": "1"}
    assert load(environment=environment) == Config()


def test_all_errors_are_told_at_once_with_their_places(errors: Callable[..., list[str]]) -> None:
    assert errors(
        """
        [server]
        listen = "nowhere"
        [membership]
        source = "static"
        replicas = [{endpoint = "a:1", wieght = 2}, {endpoint = "b"}]
        [routing]
        policy = "best"
        saturation_in_flight = "many"
        vnode = 3
        [metrics]
        port = 9090
        """,
        EXTPROC_TELEMETRY__EXPORTER="stdout",
        EXTPROC_ROUTING__SHED="perhaps",
        EXTPROC_LOAD__POLL_S="-1",
        EXTPROC_TRACING__ON="1",
    ) == [
        "FILE: server: listen: expected \"host:port\", got 'nowhere'",
        "FILE: membership.replicas.0.wieght: unknown key",
        "FILE: membership.replicas.1: expected \"host:port\", got 'b'",
        "EXTPROC_LOAD__POLL_S: load: poll_s and timeout_s must be above 0",
        "FILE: routing.policy: Input should be 'expected_work', 'ring_spillover' or 'bounded_load'",
        "FILE: routing.saturation_in_flight: Input should be a valid integer, unable to parse string as an integer",
        "EXTPROC_ROUTING__SHED: routing.shed: Input should be a valid boolean, unable to interpret input",
        "FILE: routing.vnode: unknown key; did you mean vnodes?",
        "EXTPROC_TELEMETRY__EXPORTER: telemetry.exporter: Input should be 'none', 'console' or 'otlp'",
        "FILE: metrics: unknown key",
        "EXTPROC_TRACING__ON: tracing: unknown key",
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("server = 3", "server: Input should be a table"),
        ('[features]\nmask = "date"', "features.mask: Input should be an array"),
        ("[features]\nsession_fields = [1]", "features.session_fields.0: Input should be a valid string"),
        ('[membership.models]\napp = "m"', "membership.models.app: Input should be an array"),
        ("[server]\nlisten = 50051", "server.listen: Input should be a valid string"),
        ("[routing]\nvnodes = 1.5", "routing.vnodes: Input should be a valid integer"),
        ("[router]\nvnodes = 1", "router: unknown key; did you mean routing?"),
        ("[load]\ntimeout = 1", "load.timeout: unknown key; did you mean timeout_s?"),
    ],
)
def test_a_wrong_shape_is_named(errors: Callable[..., list[str]], text: str, error: str) -> None:
    (line,) = errors(text)
    assert line.startswith(f"FILE: {error}")


@pytest.mark.parametrize(
    ("section", "values", "error"),
    [
        ("server", "keepalive_s = 0", "max_message_bytes and keepalive_s must be above 0"),
        ("server", "drain_s = -1", "notice_s and drain_s must be at least 0"),
        ("server", 'listen = "host:65536"', "listen: expected \"host:port\", got 'host:65536'"),
        ("server", 'listen = "::1:80"', "listen: expected \"host:port\", got '::1:80'"),
        ("server", 'tls_key = "key.pem"', "tls_certificate and tls_key go together"),
        ("server", 'tls_client_ca = "ca.pem"', "tls_client_ca needs tls_certificate and tls_key"),
        ("envoy", 'router_tls_key = "key.pem"', "router_tls_certificate and router_tls_key go together"),
        (
            "envoy",
            'router_tls_key = "key.pem"\nrouter_tls_certificate = "c.pem"',
            "router_tls_certificate needs router_tls_ca",
        ),
        ("membership", "poll_s = 0", "poll_s must be above 0"),
        ("membership", "poll_s = nan", "poll_s must be above 0"),
        ("membership", "confirm_s = -1", "confirm_s must be at least 0"),
        ("membership", 'ray_serve_url = "localhost:8265"', "ray_serve_url must begin with http:// or https://"),
        ("membership", "weights = {app = 0}", "weights must be above 0"),
        ("membership", "weights = {app = inf}", "weights must be above 0"),
        ("membership", 'source = "static"', 'source = "static" needs replicas'),
        ("membership", 'source = "file"', 'source = "file" needs file'),
        ("membership", 'source = "dns"', 'source = "dns" needs dns'),
        ("membership", 'file = "x"', 'file needs source = "file", but source is "ray_serve"'),
        ("membership", 'source = "dns"\ndns = "10.0.0.1:80"', "'10.0.0.1:80' is an address, not a name"),
        (
            "membership",
            'source = "static"\nreplicas = [{endpoint = "a:1"}, {endpoint = "a:1", id = "b"}]',
            "two replicas have the same endpoint: a:1",
        ),
        (
            "membership",
            'source = "static"\nreplicas = [{endpoint = "a:1"}, {endpoint = "b:1", id = "a:1"}]',
            "two replicas have the same id: a:1",
        ),
        ("health", "probe_s = 0", "probe_s and timeout_s must be above 0"),
        ("health", 'path = "healthz"', 'path must begin with "/"'),
        ("load", "timeout_s = nan", "poll_s and timeout_s must be above 0"),
        ("load", 'path = ""', 'path must begin with "/"'),
        ("routing", "vnodes = 0\nretry_after_s = nan", "retry_after_s must be above 0; vnodes must be above 0"),
        ("routing", "bounded_load_factor = 1", "bounded_load_factor must be above 1"),
        ("features", 'mask = ["moon"]', "unknown mask 'moon'"),
        ("features", 'mask_patterns = ["("]', "mask pattern '(': "),
        ("telemetry", "sample_ratio = 1.01", "sample_ratio must be from 0 to 1"),
        ("telemetry", "sample_ratio = nan", "sample_ratio must be from 0 to 1"),
        ("envoy", 'admin = "9901"', 'admin: expected "host:port"'),
        ("envoy", "retries = -1", "retries must be at least 0"),
    ],
)
def test_ranges_and_rules(errors: Callable[..., list[str]], section: str, values: str, error: str) -> None:
    (line,) = errors(f"[{section}]\n{values}")
    assert line.startswith(f"FILE: {section}: {error}")


def test_a_rule_over_file_and_variable_names_both(errors: Callable[..., list[str]]) -> None:
    (line,) = errors('[membership]\nfile = "fleet.toml"', EXTPROC_MEMBERSHIP__SOURCE="static")
    assert line == 'FILE, EXTPROC_MEMBERSHIP__SOURCE: membership: source = "static" needs replicas'


def test_a_variable_that_is_no_json_is_named(errors: Callable[..., list[str]]) -> None:
    (line,) = errors("", EXTPROC_MEMBERSHIP__REPLICAS='[{"endpoint":')
    assert line == "EXTPROC_MEMBERSHIP__REPLICAS: membership.replicas: Input should be an array"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"[server\n", "line 1"),
        (b"[server]\nlisten = \n", "line 2"),
        (b"[server]\n[server]\n", "server"),
        (b'[server]\nlisten = "\xff"\n', "utf-8"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_error(tmp_path: Path, content: bytes | None, error: str) -> None:
    path = tmp_path / "extproc.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(path, {"EXTPROC_SERVER__LISTEN": "also wrong"})
    (line,) = caught.value.errors
    assert line.startswith(f"{path}: ")
    assert error in line


def test_a_secret_is_not_in_an_error(errors: Callable[..., list[str]]) -> None:
    for lines in (
        errors('[features]\nsecret = ["hunter2"]'),
        errors('[features]\nsecret = "hunter2"\nmask = 3'),
        errors('[features]\nsecret = "hunter2\n'),
        errors("", EXTPROC_FEATURES__SECRET='["hunter2"]'),
    ):
        assert "hunter2" not in "".join(lines)


def test_what_is_printed_can_be_read_again(tmp_path: Path) -> None:
    config = of_file(tmp_path, STATIC + 'replicas = [{endpoint = "a:1"}]\n[routing]\npolicy = "bounded_load"\n', {})
    sections = json.loads(to_json(config))
    assert sections.keys() == {each.name for each in fields(Config)}
    variables = {
        f"EXTPROC_{section}__{key}".upper(): value if isinstance(value, str) else json.dumps(value)
        for section, values in sections.items()
        for key, value in values.items()
    }
    assert load(environment=variables) == config


@pytest.mark.parametrize("path", ["", "router.sock", "/", "/" + "x" * 107])
def test_a_socket_that_none_can_listen_on_is_an_error(errors: Callable[..., list[str]], path: str) -> None:
    for section, key in (("server", "listen"), ("envoy", "router")):
        (error,) = errors(f'[{section}]\n{key} = "unix:{path}"')
        assert f"{section}: {key}: expected" in error
