"""Configuration: a TOML file, then the environment, then one validation that reports every error.

A key is `section.key` in the file and EXTPROC_SECTION__KEY in the environment, which wins. Sections are the settings
of the modules they belong to; ranges are checked there.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError

from extproc.address import socket_path
from extproc.admin.settings import AdminSettings
from extproc.core.features import FeatureSettings
from extproc.core.settings import RouterSettings
from extproc.envoy_config import EnvoySettings
from extproc.feeds.engine_metrics import LoadSettings
from extproc.feeds.health import HealthSettings
from extproc.membership import MembershipSettings
from extproc.server import ServerSettings
from extproc.telemetry import TelemetrySettings

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX: Final = "EXTPROC_"


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. Each section's class says what its keys mean, in which units, and where defaults come from."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # holds for the sections too

    server: ServerSettings = field(default_factory=ServerSettings)
    membership: MembershipSettings = field(default_factory=MembershipSettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    load: LoadSettings = field(default_factory=LoadSettings)
    features: FeatureSettings = field(default_factory=FeatureSettings)
    routing: RouterSettings = field(default_factory=RouterSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    admin: AdminSettings = field(default_factory=AdminSettings)
    envoy: EnvoySettings = field(default_factory=EnvoySettings)


class ConfigError(Exception):
    """errors: one line each, "where: section.key: what", where = the file or the environment variable."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors


_ADAPTER = TypeAdapter(Config)


def load(path: str | Path | None = None, environment: Mapping[str, str] = os.environ) -> Config:
    """The configuration; without a file, defaults and environment. Raises ConfigError."""
    document = _read(Path(path)) if path is not None else {}
    in_file = frozenset(document)
    variables = _overlay(document, environment)
    try:
        return _ADAPTER.validate_python(document)
    except ValidationError as error:
        raise ConfigError(
            [
                f"{_origin(found['loc'], path, in_file, variables)}: {'.'.join(map(str, found['loc']))}: {_text(found)}"
                for found in error.errors()
            ]
        ) from None


def check_both_ends(config: Config) -> None:
    """Raises ConfigError where Envoy would speak to the router otherwise than the router listens."""
    server, envoy = config.server, config.envoy
    errors = []
    if server.tls_certificate and not envoy.router_tls_ca:
        errors.append("envoy.router_tls_ca: needed, since server.tls_certificate has the router speak TLS")
    if server.tls_client_ca and not envoy.router_tls_certificate:
        errors.append("envoy.router_tls_certificate: needed, since server.tls_client_ca asks for one")
    if envoy.router_tls_ca and not envoy.router_tls_name and socket_path(envoy.router or server.listen):
        errors.append("envoy.router_tls_name: needed, since a socket bears no name that a certificate could")
    if errors:
        raise ConfigError(errors)


def to_json(config: Config) -> str:
    """All that holds, defaults and all; of a secret only that it is set."""
    if config.features.secret:
        config = replace(config, features=replace(config.features, secret="(set)"))
    return _ADAPTER.dump_json(config, indent=2).decode()


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError([f"{path}: {error}"]) from error


def _overlay(document: dict[str, Any], environment: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """Put the environment's values over the document; returns (section, key) -> variable."""
    variables = {}
    for name, text in sorted(environment.items()):
        section, separator, key = name.removeprefix(PREFIX).lower().partition("__")
        # Without the double underscore it is not ours: Kubernetes sets EXTPROC_PORT and the like for a service
        # that is called extproc.
        if not name.startswith(PREFIX) or not separator:
            continue
        table = document.setdefault(section, {})
        if isinstance(table, dict):
            table[key] = _value(text)
            variables[section, key] = name
    return variables


def _value(text: str) -> Any:
    """Lists and tables are written as JSON; scalars are text, and validation makes of "16" what the key asks for."""
    if text.lstrip().startswith(("[", "{")):
        try:
            return json.loads(text)
        except ValueError:
            pass
    return text


def _origin(
    key: tuple[int | str, ...],
    path: str | Path | None,
    in_file: frozenset[str],
    variables: Mapping[tuple[str, str], str],
) -> str:
    """Where a wrong value comes from; a rule over several keys of a section may have been broken by any of them."""
    section, *rest = map(str, key)
    if rest and (section, rest[0]) in variables:
        return variables[section, rest[0]]
    set_here = [name for (of, _), name in variables.items() if of == section] if not rest else []
    return ", ".join([str(path), *set_here] if section in in_file else set_here)


def _text(found: Any) -> str:
    match found["type"]:
        case "unexpected_keyword_argument":
            return _unknown(found["loc"])
        case "dataclass_type" | "dict_type":
            return "Input should be a table"
        case "tuple_type":
            return "Input should be an array"
    return str(found["msg"]).removeprefix("Value error, ")


def _unknown(key: tuple[int | str, ...]) -> str:
    sections = {each.name: each.default_factory for each in fields(Config)}
    match key:
        case [_]:
            known = list(sections)
        case [section, _]:
            known = [each.name for each in fields(sections[section]) if each.init]  # type: ignore[arg-type,index]
        case _:
            known = []
    guess = difflib.get_close_matches(str(key[-1]), known, n=1)
    return f"unknown key; did you mean {guess[0]}?" if guess else "unknown key"
