"""A witness of decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extproc.core.decision import Decision
    from extproc.core.features import Features
    from extproc.core.request import Request
    from extproc.picker import ResponseStart


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
