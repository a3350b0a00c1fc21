"""docs/configuration.md says what the configuration's classes say: every key, every default, what is live."""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from extproc.config import Config, load
from extproc.feeds.static import StaticReplica
from extproc.service import LIVE_SECTIONS

PAGE = Path(__file__).parent.parent.parent / "docs" / "configuration.md"
REPLICAS = "membership.replicas"
ROW = re.compile(r"^\| `(\w+)` \| (?:`(.*?)` )?\| (.+) \|$", re.M)


def _sections() -> dict[str, str]:
    """Heading -> text below it; "(live)" stays in the heading."""
    _, *parts = re.split(r"^##+ (.+)\n", PAGE.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _default(field: Field[Any]) -> Any:
    """As TOML would have it; None where there is none."""
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    return None if value is MISSING else TypeAdapter(object).dump_python(value, mode="json")


CLASSES: dict[str, Any] = {each.name: each.default_factory for each in fields(Config)} | {REPLICAS: StaticReplica}


def test_sections_are_those_that_exist_and_live_ones_are_marked() -> None:
    expected = {name + " (live)" * (name in LIVE_SECTIONS) for name in CLASSES}
    assert set(_sections()) == expected


@pytest.mark.parametrize("name", CLASSES)
def test_every_key_is_there_with_its_default(name: str) -> None:
    text = _sections()[name + " (live)" * (name in LIVE_SECTIONS)]
    said = {key: tomllib.loads(f"x = {value}")["x"] if value else None for key, value, _ in ROW.findall(text)}
    assert said == {field.name: _default(field) for field in fields(CLASSES[name]) if field.init}
    assert len(said) == text.count("\n| `"), "a row that was not understood"


README = PAGE.parent.parent / "README.md"
EXAMPLES = re.findall(r"^```toml\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)


def test_the_readme_has_examples() -> None:
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_a_valid_configuration(example: str, tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text(example, encoding="utf-8")
    assert load(file, {}) != Config()
