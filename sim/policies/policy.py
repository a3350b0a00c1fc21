"""What a policy is, and what it hears."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.engine import Engine
    from sim.turn import Visit


class Policy:
    """Chooses a replica for each turn. Those that need to know caches look into the engines: perfect knowledge.

    state_entries: what it remembers, in entries of its own kind; 0 for one without memory.
    """

    name: str
    engines: Sequence[Engine]

    def start(self, engines: Sequence[Engine]) -> None:
        """A run begins."""
        self.engines = engines

    def choose(self, visit: Visit, now_s: float) -> int:
        """Index of the replica that gets it."""
        raise NotImplementedError

    def first_token(self, visit: Visit, now_s: float) -> None:
        """Its prefill is over."""

    def finish(self, visit: Visit, now_s: float) -> None:
        """Its stream has ended."""

    def poll(self, now_s: float) -> None:
        """The engines' metrics may be read."""

    def tick(self, now_s: float) -> None:
        """Time passes."""

    @property
    def state_entries(self) -> int:
        return 0
