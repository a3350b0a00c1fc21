"""What the router's image is built from is locked."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)", LOCK, re.M))


def test_every_dependency_is_locked_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for wanted in map(Requirement, project["dependencies"]):
        pinned = PINS.get(canonicalize_name(wanted.name))
        assert pinned is not None, f"{wanted.name} is not locked: make lock"
        assert wanted.specifier.contains(pinned, prereleases=True), f"{wanted} is locked at {pinned}: make lock"


def test_everything_locked_has_a_hash_and_comes_from_nowhere_in_particular() -> None:
    blocks = re.split(r"^(?=[\w.-]+==)", LOCK, flags=re.M)[1:]
    assert len(blocks) == len(PINS) > 20
    assert all("--hash=sha256:" in block for block in blocks)
    assert not re.search(r"://|--(extra-)?index-url|--find-links|--trusted-host| @ ", LOCK)


def test_the_router_s_image_installs_what_is_locked_and_nothing_else() -> None:
    stage = re.search(r"^FROM base AS extproc\n(.*?)^FROM", (ROOT / "Dockerfile").read_text("utf-8"), re.M | re.S)
    assert stage is not None
    installed = re.findall(r"pip install (.*)", stage[1])
    assert any("--require-hashes -r /opt/requirements.lock" in each for each in installed)
    assert all("--no-deps" in each for each in installed)
