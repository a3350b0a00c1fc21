"""Workloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.turn import Turn


@dataclass(frozen=True, slots=True)
class Workload:
    """turns: in order of `at_s`; each may have others to follow."""

    name: str
    block_tokens: int
    turns: list[Turn]

    def __len__(self) -> int:
        """Number of requests, those that follow others included."""
        count = 0
        for turn in self.turns:
            following: Turn | None = turn
            while following is not None:
                count += 1
                following = following.then
        return count
