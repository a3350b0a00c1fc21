"""What is promised of every fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.figures import RECOVERY_S, Figures
from tests.chaos.load import Load, Outcome

if TYPE_CHECKING:
    from tests.chaos.site import Replica


def assert_unnoticed(row: Figures) -> None:
    assert (row.failed, row.cut, row.moved, row.astray) == (0, 0, 0, 0), row
    assert row.recovery_s < RECOVERY_S, row


def assert_only_begun_answers_lost(row: Figures, load: Load, fault_s: float, victim: Replica | None = None) -> None:
    failed = [each for each in load.exchanges if each.outcome is Outcome.FAILED]
    assert (failed, row.moved, row.astray) == ([], 0, 0), row
    assert row.recovery_s < RECOVERY_S, row
    for cut in (each for each in load.exchanges if each.outcome is Outcome.CUT):
        assert victim is not None
        assert cut.replica in {victim.id, ""}, cut
        assert cut.began_s < fault_s, cut
