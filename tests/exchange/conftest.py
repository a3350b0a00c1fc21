"""The real router behind an exchange, with a clock that the test moves."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from extproc.core.features import FeatureSettings
from extproc.core.replica import Replica
from extproc.core.router import Router, RouterSettings
from extproc.exchange import Exchange
from extproc.picker import EndpointPicker
from tests.support.watch import Watch


@dataclass
class Desk:
    """What one test looks at."""

    router: Router = field(default_factory=Router)
    watch: Watch = field(default_factory=Watch)
    now_s: float = 1000.0

    def __post_init__(self) -> None:
        self.picker = EndpointPicker(
            self.router, FeatureSettings(), self.watch, max_unread_bytes=1 << 20, clock=lambda: self.now_s
        )

    def join(self, *endpoints: str) -> None:
        self.router.set_members([Replica(f"replica-{each}", each) for each in endpoints], self.now_s)

    def exchange(self, max_head_bytes: int = 1 << 20) -> Exchange:
        return Exchange(self.picker, max_head_bytes)


ENDPOINT = "10.0.0.1:8000"


@pytest.fixture
def desk() -> Desk:
    """A fleet of one: every route names it."""
    desk = Desk()
    desk.join(ENDPOINT)
    return desk


@pytest.fixture
def saturated() -> Desk:
    """A fleet of one at its limit, with shedding on."""
    desk = Desk(router=Router(RouterSettings(saturation_in_flight=0, shed=True, retry_after_s=2.5)))
    desk.join(ENDPOINT)
    return desk
