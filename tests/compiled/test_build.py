"""Run by `make test-compiled`: it is compiled modules that the suites beside this one go through."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import extproc
from extproc.build import COMPILED
from hatch_build import sources

ROOT = Path(__file__).parent.parent.parent
MODULES = [".".join(path.with_suffix("").parts) for path in sources(ROOT)]

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_the_hot_path_is_compiled(name: str) -> None:
    file = Path(importlib.import_module(name).__file__ or "")
    assert file.is_relative_to(ROOT / "build" / "compiled")
    assert file.name.endswith(EXTENSION_SUFFIXES[0])


def test_it_knows_that_it_is_compiled() -> None:
    assert "extproc.core.router" in MODULES
    assert COMPILED


def test_a_program_that_is_started_is_compiled_too() -> None:
    command = "from extproc.build import COMPILED; raise SystemExit(not COMPILED)"
    assert subprocess.run([sys.executable, "-c", command], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_sources_lie_beside_and_are_the_checkouts() -> None:
    for path in sources(ROOT):
        assert (ROOT / "build" / "compiled" / path).read_bytes() == (ROOT / path).read_bytes()
    assert Path(extproc.__file__ or "").is_relative_to(ROOT / "build" / "compiled")


def test_the_checkout_holds_nothing_compiled() -> None:
    assert not [path for path in (ROOT / "extproc").rglob("*") if path.name.endswith(tuple(EXTENSION_SUFFIXES))]
