"""The real router behind an exchange, with a clock that the test moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from extproc.core.features import FeatureSettings
from extproc.core.replica import Replica
from extproc.core.router import Router, RouterSettings
from extproc.exchange import Exchange
from extproc.picker import EndpointPicker, ResponseStart

if TYPE_CHECKING:
    from extproc.core.decision import Decision
    from extproc.core.features import Features
    from extproc.core.request import Request


@dataclass
class Watch:
    """A DecisionObserver that writes down what it is told."""

    requests: list[Request] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    starts: list[ResponseStart] = field(default_factory=list)
    finished_count: int = 0

    def decided(self, request: Request, features: Features, decision: Decision, took_s: float) -> None:
        self.requests.append(request)
        self.decisions.append(decision)

    def response_started(self, decision: Decision, start: ResponseStart, since_decision_s: float) -> None:
        self.starts.append(start)

    def finished(self, decision: Decision, since_decision_s: float) -> None:
        self.finished_count += 1


@dataclass
class Desk:
    """What one test looks at."""

    router: Router = field(default_factory=Router)
    watch: Watch = field(default_factory=Watch)
    now_s: float = 1000.0

    def __post_init__(self) -> None:
        self.picker = EndpointPicker(self.router, FeatureSettings(), self.watch, clock=lambda: self.now_s)

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
