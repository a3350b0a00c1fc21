"""What docs/operations.md tells people to look at and to type is there."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from demo.ports import free_port
from extproc.config import Config
from extproc.core.decision import Reason
from tests.support.envoy import Envoy
from tests.telemetry.test_rules import headings, series

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
SPANS = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "extproc").rglob("*.py"))


def named(pattern: str, text: str = PAGE) -> set[str]:
    found = set(re.findall(pattern, text, re.M))
    assert found, pattern
    return found


def test_metrics() -> None:
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in series()} | set(series())
    assert named(r"\bextproc_\w+") <= families


def test_settings_and_attributes() -> None:
    keys = {f"{of.name}.{key.name}" for of in fields(Config) for key in fields(of.default_factory)}  # type: ignore[arg-type]
    attributes = named(r"^\| `([a-z_.]+)` \|", SPANS)
    sections = "|".join(of.name for of in fields(Config))
    assert named(rf"`((?:{sections})\.\w+)(?: = \w+)?`") <= keys | attributes
    assert named(r"`(server\.address)`") <= attributes


def test_reasons() -> None:
    table = PAGE.partition("## What each reason tells")[2].partition("\n## ")[0]
    rows = named(r"^\| (`.+`) \|", table)
    assert {word.strip("`") for row in rows for word in row.split(", ")} == set(Reason)


def test_commands() -> None:
    offered = subprocess.run([sys.executable, "-m", "extproc", "--help"], capture_output=True, text=True, check=True)
    assert [each for each in named(r"`extproc ([a-z-]+)") if each not in offered.stdout] == []
    targets = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "Makefile", *(ROOT / "make").glob("*.mk")))
    assert all(f"\n{target}:" in targets for target in named(r"`make ([a-z-]+)`"))
    assert all((ROOT / f"{module.replace('.', '/')}.py").exists() for module in named(r"`python -m ([\w.]+)"))


def test_pages_and_log_lines() -> None:
    paths = named(r"localhost:9902(/[a-z/]+)") | (named(r"`(/[a-z/]+)`") - {"/stats", "/metrics"})
    assert [path for path in paths if f'"{path}"' not in SOURCE] == []
    assert [event for event in named(r"\(`([a-z ]+)`") if f'"{event}' not in SOURCE] == []


def test_links() -> None:
    for page, anchor in re.findall(r"\]\(([\w.]*)#(\w+)\)", PAGE):
        assert not page
        assert anchor in {heading.lower() for heading in headings()}
    assert all((ROOT / "docs" / page).exists() for page in named(r"\]\((\w+\.md)"))


@pytest.mark.e2e
def test_what_envoy_is_asked_for(tmp_path: Path) -> None:
    with Envoy(tmp_path, f"127.0.0.1:{free_port()}") as envoy:
        stats = envoy.admin("/stats")
        assert "extproc::" in envoy.admin("/clusters")
        assert "health_flags" in envoy.admin("/clusters")
    assert "http.clients.ext_proc.message_timeouts:" in stats
    assert "http.clients.ext_proc.failure_mode_allowed:" in stats
    assert named(r"`(http\.clients\.ext_proc\.message_timeouts)`")
