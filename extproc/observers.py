"""Several observers of decisions as one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extproc.core.decision import Decision
    from extproc.core.features import Features
    from extproc.core.request import Request
    from extproc.picker import DecisionObserver, ResponseStart


log = logging.getLogger(__name__)


class Observers:
    """A DecisionObserver that tells each of its members, in their order.

    What one of them raises is logged, and is neither the request's trouble nor the others'.
    """

    def __init__(self, *observers: DecisionObserver) -> None:
        self._observers = observers

    def decided(self, request: Request, features: Features, decision: Decision, took_s: float) -> None:
        for observer in self._observers:
            try:
                observer.decided(request, features, decision, took_s)
            except Exception:
                log.exception("an observer failed")

    def response_started(self, decision: Decision, start: ResponseStart, since_decision_s: float) -> None:
        for observer in self._observers:
            try:
                observer.response_started(decision, start, since_decision_s)
            except Exception:
                log.exception("an observer failed")

    def finished(self, decision: Decision, since_decision_s: float) -> None:
        for observer in self._observers:
            try:
                observer.finished(decision, since_decision_s)
            except Exception:
                log.exception("an observer failed")
