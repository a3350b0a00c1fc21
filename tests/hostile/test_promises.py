"""docs/security.md names a test for each promise, and each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
PROMISES = re.findall(r"^\| (.+?) \| (.+) \|$", PAGE.partition("## What is promised")[2], re.M)


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_the_test_exists(file: str, test: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_each_promise_names_a_test() -> None:
    promises = [(promise, shown) for promise, shown in PROMISES if promise not in ("promise", "---")]
    assert len(promises) > 20
    for promise, shown in promises:
        assert "::test_" in shown, promise
