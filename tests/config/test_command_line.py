"""The commands that only look at a configuration."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml

from extproc.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "extproc.toml"
    path.write_text(
        '[server]\nlisten = "127.0.0.1:4001"\n[features]\nsecret = "hunter2"\nsession_headers = ["x-room"]\n',
        encoding="utf-8",
    )
    return path


def test_check_config_prints_all_that_holds_but_the_secret(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", "--config", str(file)]) == 0
    printed = capsys.readouterr().out
    document = json.loads(printed)
    assert document["server"]["listen"] == "127.0.0.1:4001"
    assert document["features"]["session_headers"] == ["x-room"]
    assert document["features"]["secret"] == "(set)"
    assert document["routing"]["policy"] == "expected_work"
    assert "hunter2" not in printed


def test_check_config_tells_an_absent_secret_from_a_set_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.toml").touch()
    assert main(["check-config", "--config", str(tmp_path / "empty.toml")]) == 0
    assert json.loads(capsys.readouterr().out)["features"]["secret"] == ""


@pytest.mark.parametrize("command", ["check-config", "envoy-config", "serve"])
def test_errors_are_printed_one_a_line(file: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text('[server]\nlisten = "x"\n[routing]\nzzz = 1\n', encoding="utf-8")
    assert main([command, "--config", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        f"{file}: server: listen: expected \"host:port\", got 'x'",
        f"{file}: routing.zzz: unknown key",
    ]


def test_envoy_config_fits_the_configuration(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envoy-config", "--config", str(file)]) == 0
    printed = capsys.readouterr().out
    bootstrap = yaml.safe_load(printed)
    assert bootstrap["static_resources"]["listeners"]
    assert "port_value: 4001" in printed
    assert "header_name: x-room" in printed
    written = file.with_suffix(".yaml")
    assert main(["envoy-config", "--config", str(file), "-o", str(written)]) == 0
    assert written.read_text(encoding="utf-8") == printed


def test_wrong_usage_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check-config", "--conifg", "x"])
    assert ended.value.code == 2
    assert "--conifg" in capsys.readouterr().err


SDS = "tls_certificate_sds_secret_configs"
TLS = """
[server]
listen = "unix:/run/extproc.sock"
tls_certificate = "/tls/router.pem"
tls_key = "/tls/router-key.pem"
tls_client_ca = "/tls/ca.pem"
"""
ENVOYS_PART = """
[envoy]
router_tls_ca = "/envoy/ca.pem"
router_tls_name = "router.example"
router_tls_certificate = "/envoy/client.pem"
router_tls_key = "/envoy/client-key.pem"
"""


def test_envoy_config_writes_tls_secrets_beside_the_bootstrap(file: Path, tmp_path: Path) -> None:
    file.write_text(TLS + ENVOYS_PART, encoding="utf-8")
    output = tmp_path / "envoy.yaml"
    assert main(["envoy-config", "--config", str(file), "-o", str(output)]) == 0
    (router,) = (each for each in yaml.safe_load(output.read_text())["static_resources"]["clusters"][1:])
    context = router["transport_socket"]["typed_config"]["common_tls_context"]
    ca = context["combined_validation_context"]["validation_context_sds_secret_config"]
    named = [source["sds_config"]["path_config_source"]["path"] for source in (ca, *context[SDS])]
    assert named == [str(tmp_path / "router-ca.yaml"), str(tmp_path / "router-client.yaml")]
    secrets = [yaml.safe_load((tmp_path / path).read_text())["resources"][0] for path in named]
    assert secrets[0]["validation_context"]["trusted_ca"]["filename"] == "/envoy/ca.pem"
    assert secrets[1]["tls_certificate"]["private_key"]["filename"] == "/envoy/client-key.pem"


@pytest.mark.parametrize(
    ("envoys_part", "missing"),
    [
        ("", ["envoy.router_tls_ca", "envoy.router_tls_certificate"]),
        ('[envoy]\nrouter_tls_ca = "/ca.pem"\n', ["envoy.router_tls_certificate", "envoy.router_tls_name"]),
    ],
)
def test_an_envoy_that_could_not_speak_to_the_router_is_not_rendered(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], envoys_part: str, missing: list[str]
) -> None:
    file.write_text(TLS + envoys_part, encoding="utf-8")
    assert main(["envoy-config", "--config", str(file), "-o", str(tmp_path / "envoy.yaml")]) == 2
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == missing
    assert not (tmp_path / "envoy.yaml").exists()


def test_tls_secrets_have_no_place_on_standard_output(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(TLS + ENVOYS_PART, encoding="utf-8")
    assert main(["envoy-config", "--config", str(file)]) == 2
    printed = capsys.readouterr()
    assert (printed.out, "-o" in printed.err) == ("", True)
