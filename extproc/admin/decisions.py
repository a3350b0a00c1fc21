"""The last decisions, to be looked at: what was asked, where it went and why, and how it ended."""

from __future__ import annotations

import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.core.decision import Decision
    from extproc.core.features import Features
    from extproc.core.request import Request
    from extproc.core.router import Router
    from extproc.picker import ResponseStart

MODEL_LENGTH: Final = 100
"""Clients name models, so a name may be of any length, and the last decisions are kept."""
KEY_DIGITS: Final = 10
"""Of a conversation's key, which is a hash already: enough to follow one among a thousand decisions, and too few to
find its place on the ring."""


class RecordedDecision:
    """One decision and what became of it. Plain values: a Decision would keep its lease and its replica alive.

    serial: counts decisions from 1. Times in seconds since the decision, None while it has not come so far, or where
    the data plane does not say.
    """

    __slots__ = (
        "api",
        "by_headers",
        "cached_tokens",
        "decided_unix_s",
        "ended_s",
        "first_token_s",
        "in_flight",
        "key",
        "model",
        "predicted_tokens",
        "primary",
        "prompt_tokens",
        "reason",
        "replica_id",
        "serial",
        "source",
        "status",
        "streamed",
        "told_prompt_tokens",
        "took_s",
        "work_tokens",
    )

    def __init__(
        self, serial: int, features: Features, decision: Decision, took_s: float, bytes_per_token: float
    ) -> None:
        self.serial = serial
        self.decided_unix_s = time.time()
        self.api = features.api
        self.model = features.model[:MODEL_LENGTH] if features.model is not None else None
        self.source = features.conversation_source
        self.by_headers = features.by_headers
        self.key = features.conversation_key
        self.reason = decision.reason
        self.replica_id = decision.replica_id
        self.primary = decision.primary
        self.prompt_tokens = decision.prompt_tokens
        self.predicted_tokens = min(decision.matched_bytes / bytes_per_token, decision.prompt_tokens)
        self.work_tokens: float | None = None
        self.in_flight: int | None = None
        for load, _, _, work_tokens, in_flight in decision.weighed:
            if load.replica.id == decision.replica_id:
                self.work_tokens, self.in_flight = work_tokens, in_flight
                break
        self.took_s = took_s
        self.status: int | None = None
        self.told_prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.streamed = features.streamed
        self.first_token_s: float | None = None
        self.ended_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        """`predicted_tokens`, `cached_tokens`: found in the cache, as thought and as the engine told."""
        return {
            "serial": self.serial,
            "decided_unix_s": round(self.decided_unix_s, 3),
            "api": self.api.value,
            "model": self.model,
            "conversation_source": self.source,
            "by_headers": self.by_headers,
            "conversation": self.key.hex()[:KEY_DIGITS] if self.key is not None else None,
            "reason": self.reason.value,
            "replica": self.replica_id,
            "primary": self.primary,
            "work_tokens": round(self.work_tokens, 1) if self.work_tokens is not None else None,
            "in_flight": self.in_flight,
            "expected_prompt_tokens": self.prompt_tokens,
            "predicted_tokens": round(self.predicted_tokens),
            "decision_us": round(self.took_s * 1e6),
            "status": self.status,
            "prompt_tokens": self.told_prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "first_token_s": round(self.first_token_s, 4) if self.first_token_s is not None else None,
            "ended_s": round(self.ended_s, 4) if self.ended_s is not None else None,
        }


class RecentDecisions:
    """A DecisionObserver that keeps the last `size` decisions.

    last_serial: of the newest; 0 before the first.
    """

    def __init__(self, router: Router, size: int) -> None:
        self._router = router
        self.last_serial = 0
        self._kept: deque[RecordedDecision] = deque(maxlen=size)
        self._open: dict[int, RecordedDecision] = {}

    def newest(self, count: int) -> list[dict[str, Any]]:
        """At most so many, the newest first."""
        return [each.as_json() for each in islice(reversed(self._kept), max(0, count))]

    def since(self, serial: int, count: int) -> list[dict[str, Any]]:
        """Those after `serial`, at most so many, the newest first."""
        return [each.as_json() for each in islice(self._after(serial), max(0, count))]

    def _after(self, serial: int) -> Iterator[RecordedDecision]:
        for each in reversed(self._kept):
            if each.serial <= serial:
                return
            yield each

    # --- DecisionObserver ---

    def decided(self, request: Request, features: Features, decision: Decision, took_s: float) -> None:
        self.last_serial += 1
        record = RecordedDecision(self.last_serial, features, decision, took_s, self._router.bytes_per_token)
        self._kept.append(record)
        self._open[id(decision)] = record  # the pick keeps the decision, hence its id, until `finished`

    def response_started(self, decision: Decision, start: ResponseStart, since_decision_s: float) -> None:
        record = self._open.get(id(decision))
        if record is None:
            return
        record.status = start.status
        record.told_prompt_tokens = start.prompt_tokens
        record.cached_tokens = start.cached_tokens
        if start.first_token and record.streamed:  # any other answer begins when its last token is there
            record.first_token_s = since_decision_s

    def finished(self, decision: Decision, since_decision_s: float) -> None:
        record = self._open.pop(id(decision), None)
        if record is not None:
            record.ended_s = since_decision_s
