"""What a fault cost: figures from the record of a load, and their table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.chaos.load import Outcome

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from tests.chaos.load import Exchange

RECOVERY_S = 1.0
"""The promise: so long after the return of what had failed, every session is answered at its home again."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One fault's. A session's home: the replica that answered it before.

    failed: requests without an answer. cut: answers that broke off.
    moved: answers elsewhere than at home before the fault, or later than RECOVERY_S after the return.
    astray: sessions that were answered by more than one replica besides their home during the fault.
    slowest_s: longest exchange. recovery_s: from the return to the last request that was answered elsewhere.
    """

    fault: str
    requests: int
    failed: int
    cut: int
    moved: int
    astray: int
    slowest_s: float
    recovery_s: float


def figures(
    fault: str, exchanges: Sequence[Exchange], fault_s: float, back_s: float, gone: Collection[str] = ()
) -> Figures:
    """fault_s, back_s: monotonic seconds of the fault and of the return.

    gone: replicas that do not return; a session of theirs has its home where it is answered last.
    Raises ValueError where a session was not asked in each of the phases.
    """
    before = [each for each in exchanges if each.ended_s < fault_s]
    during = [each for each in exchanges if fault_s <= each.began_s < back_s]
    after = [each for each in exchanges if each.began_s >= back_s]
    sessions = {each.session for each in exchanges}
    homes = {each.session: each.replica for each in before if each.outcome is Outcome.WHOLE}
    if homes.keys() != sessions or {each.session for each in after} != sessions:
        raise ValueError(f"{fault}: not every session was asked before and after")
    last = {each.session: each.replica for each in after if each.outcome is Outcome.WHOLE}
    homes_after = {session: last[session] if home in gone else home for session, home in homes.items()}

    def elsewhere(some: Iterable[Exchange], homes: Mapping[str, str]) -> list[Exchange]:
        return [each for each in some if each.outcome is Outcome.WHOLE and each.replica != homes[each.session]]

    strangers = {(each.session, each.replica) for each in elsewhere(during, homes)}
    lost = elsewhere(after, homes_after)
    late = [each for each in lost if each.began_s > back_s + RECOVERY_S]
    outcomes = [each.outcome for each in exchanges]
    return Figures(
        fault,
        requests=len(exchanges),
        failed=outcomes.count(Outcome.FAILED),
        cut=outcomes.count(Outcome.CUT),
        moved=len(elsewhere(before, homes)) + len(late),
        astray=len(strangers) - len({session for session, _ in strangers}),
        slowest_s=max(each.ended_s - each.began_s for each in exchanges),
        recovery_s=max((each.began_s - back_s for each in lost), default=0.0),
    )


def table(rows: Iterable[Figures]) -> list[str]:
    """In Markdown."""
    lines = [
        "| fault | requests | failed | cut | moved | astray | slowest s | recovery s |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.fault} | {row.requests} | {row.failed} | {row.cut} | {row.moved} | {row.astray} "
        f"| {row.slowest_s:.2f} | {row.recovery_s:.2f} |"
        for row in rows
    ]
    return lines
