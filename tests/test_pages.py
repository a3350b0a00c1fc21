"""Pages point at what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "envoy" / "README.md"]
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
NAMED = re.compile(r"`((?:demo|deploy|docs|envoy|extproc|make|serve_app|sim|tests)/[\w./*-]*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    dead = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    dead += [path for path in NAMED.findall(text) if not any(ROOT.glob(path.rstrip("/")))]
    assert not dead


def test_the_readme_names_only_targets_that_make_has() -> None:
    makefiles = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "Makefile", *(ROOT / "make").glob("*.mk")])
    targets = set(re.findall(r"^([a-z-]+):", makefiles, re.M))
    named = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named
    assert named <= targets
