from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.chaos.figures import Figures, table
from tests.chaos.site import Site, site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

ROWS = pytest.StashKey[list[Figures]]()


@pytest_asyncio.fixture
async def running(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as running:
        yield running


@pytest.fixture
def rows(pytestconfig: pytest.Config) -> list[Figures]:
    """Of the table that is printed at the end."""
    return pytestconfig.stash.setdefault(ROWS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if rows := config.stash.get(ROWS, []):
        terminalreporter.section("faults")
        for line in table(rows):
            terminalreporter.write_line(line)
