"""Configuration: a TOML file, then the environment, then one validation that reports every error.

A key is `section.key` in the file and EXTPROC_SECTION__KEY in the environment, which wins. Values in the
environment are JSON where they parse as it, else text. Sections are the settings of the modules they belong to.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter, ValidationError

from extproc.core.features import FeatureSettings
from extproc.core.settings import RouterSettings
from extproc.envoy_config import EnvoySettings
from extproc.feeds.engine_metrics import LoadSettings
from extproc.membership import MembershipSettings
from extproc.server import ServerSettings
from extproc.telemetry import TelemetrySettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PREFIX: Final = "EXTPROC_"


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. Each section's class says what its keys mean, in which units, and where defaults come from."""

    server: ServerSettings = field(default_factory=ServerSettings)
    membership: MembershipSettings = field(default_factory=MembershipSettings)
    load: LoadSettings = field(default_factory=LoadSettings)
    features: FeatureSettings = field(default_factory=FeatureSettings)
    routing: RouterSettings = field(default_factory=RouterSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    envoy: EnvoySettings = field(default_factory=EnvoySettings)


class ConfigError(Exception):
    """errors: one line each, "where: what", where = the file and key or the environment variable."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors


_ADAPTER = TypeAdapter(Config)


def load(path: str | Path | None = None, environment: Mapping[str, str] = os.environ) -> Config:
    """The configuration. Raises ConfigError."""
    document = _read(Path(path)) if path is not None else {}
    where = f"{path}" if path is not None else "defaults"
    from_environment = _overlay(document, environment)
    errors = [f"{_place(key, where, from_environment)}: unknown key" for key in _unknown(document)]
    try:
        config = _ADAPTER.validate_python(document)
    except ValidationError as error:
        for found in error.errors():
            key = tuple(str(step) for step in found["loc"])
            text = found["msg"].removeprefix("Value error, ")
            errors.append(f"{_place(key, where, from_environment)}: {text}")
    if errors:
        raise ConfigError(errors)
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError([f"{path}: {error}"]) from error


def _overlay(document: dict[str, Any], environment: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """Put the environment's values over the document; returns key -> variable."""
    taken = {}
    for name, text in sorted(environment.items()):
        section, separator, key = name.removeprefix(PREFIX).lower().partition("__")
        if not name.startswith(PREFIX) or not separator:
            continue
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        table = document.setdefault(section, {})
        if isinstance(table, dict):
            table[key] = value
            taken[section, key] = name
    return taken


def _unknown(document: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    sections = {section.name: section for section in dataclasses.fields(Config)}
    for name, table in document.items():
        if name not in sections:
            yield (name,)
        elif isinstance(table, dict):
            factory = sections[name].default_factory
            known = {key.name for key in dataclasses.fields(factory)}  # type: ignore[arg-type]
            for key in table:
                if key not in known:
                    yield name, key


def _place(key: tuple[str, ...], where: str, from_environment: Mapping[tuple[str, str], str]) -> str:
    variable = from_environment.get((key[0], key[1])) if len(key) > 1 else None
    return variable or f"{where}: {'.'.join(key)}"
