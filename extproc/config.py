"""Configuration: a TOML file, then the environment, then one validation that reports every error.

A key is `section.key` in the file and EXTPROC_SECTION__KEY in the environment, which wins. Sections are the settings
of the modules they belong to; ranges are checked there.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError

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
    variables = _overlay(document, environment)
    try:
        return _ADAPTER.validate_python(document)
    except ValidationError as error:
        source = str(path) if path is not None else "defaults"
        raise ConfigError(
            [
                f"{_origin(found['loc'], source, variables)}: {'.'.join(map(str, found['loc']))}: {_text(found)}"
                for found in error.errors()
            ]
        ) from None


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


def _origin(key: tuple[int | str, ...], source: str, variables: Mapping[tuple[str, str], str]) -> str:
    """Where a wrong value comes from; a rule over several keys of a section may have been broken by any of them."""
    set_here = [name for path, name in variables.items() if path[: len(key)] == tuple(map(str, key[:2]))]
    if not set_here:
        return source
    return set_here[0] if len(key) > 1 else ", ".join([source, *set_here])


def _text(found: Any) -> str:
    if found["type"] != "unexpected_keyword_argument":
        return str(found["msg"]).removeprefix("Value error, ")
    *section, name = found["loc"]
    sections = {each.name: each.default_factory for each in fields(Config)}
    known = [each.name for each in fields(sections[section[0]])] if len(section) == 1 else list(sections)  # type: ignore[arg-type]
    guess = difflib.get_close_matches(str(name), known, n=1) if len(section) < 2 else []
    return f"unknown key; did you mean {guess[0]}?" if guess else "unknown key"
