"""Several observers of decisions as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extproc.core.decision import Decision
    from extproc.core.features import Features
    from extproc.core.request import Request
    from extproc.picker import DecisionObserver, ResponseStart


class Observers:
    """A DecisionObserver that tells each of its members, in their order."""

    def __init__(self, *observers: DecisionObserver) -> None:
        self._observers = observers

    def decided(self, request: Request, features: Features, decision: Decision, took_s: float) -> None:
        for observer in self._observers:
            observer.decided(request, features, decision, took_s)

    def response_started(self, decision: Decision, start: ResponseStart, since_decision_s: float) -> None:
        for observer in self._observers:
            observer.response_started(decision, start, since_decision_s)

    def finished(self, decision: Decision, since_decision_s: float) -> None:
        for observer in self._observers:
            observer.finished(decision, since_decision_s)
