"""The last quarter of an hour in steps: decisions by reason, hit rate, time to first token."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from extproc.core.decision import Decision
    from extproc.core.features import Features
    from extproc.core.request import Request
    from extproc.core.router import Router
    from extproc.picker import ResponseStart

STEP_S: Final = 2.0
STEPS: Final = 450
SAMPLES: Final = 500
"""First-token times kept of one step, the first ones: enough for a 95th percentile, and a bound."""


class Step:
    """What happened in `STEP_S` seconds.

    prompt_tokens, cached_tokens: of answers that told both. engine_*: how the engines' own counters grew, which is
    all their requests, those of other routers too.
    """

    __slots__ = (
        "began_unix_s",
        "cached_tokens",
        "engine_cached_tokens",
        "engine_prompt_tokens",
        "first_token_s",
        "in_flight",
        "prompt_tokens",
        "reasons",
    )

    def __init__(self) -> None:
        self.began_unix_s = time.time()
        self.reasons: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.first_token_s: list[float] = []
        self.engine_prompt_tokens = 0
        self.engine_cached_tokens = 0
        self.in_flight = 0

    def as_json(self) -> dict[str, Any]:
        times_s = sorted(self.first_token_s)
        return {
            "began_unix_s": round(self.began_unix_s, 3),
            "reasons": dict(self.reasons),
            "in_flight": self.in_flight,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "engine_prompt_tokens": self.engine_prompt_tokens,
            "engine_cached_tokens": self.engine_cached_tokens,
            "first_token_p50_s": _percentile(times_s, 0.50),
            "first_token_p95_s": _percentile(times_s, 0.95),
        }


class History:
    """A DecisionObserver that adds up, step by step, while `run` runs."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._now = Step()
        self._past: deque[dict[str, Any]] = deque(maxlen=STEPS)
        self._counters: dict[str, tuple[int, int]] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            self.step()

    def step(self) -> None:
        """End a step and begin the next."""
        step, self._now = self._now, Step()
        step.in_flight = self._router.open_leases
        self._count_engines(step)
        self._past.append(step.as_json())

    def since(self, unix_s: float) -> list[dict[str, Any]]:
        """The steps that began after this time, the oldest first."""
        return [step for step in self._past if step["began_unix_s"] > unix_s]

    def _count_engines(self, step: Step) -> None:
        before, self._counters = self._counters, {}
        for replica_id, load in self._router.loads.items():
            engine = load.engine
            if engine is None or engine.prompt_tokens_computed is None or engine.prompt_tokens_cached is None:
                continue
            computed, cached = self._counters[replica_id] = engine.prompt_tokens_computed, engine.prompt_tokens_cached
            was_computed, was_cached = before.get(replica_id, (computed, cached))
            if computed >= was_computed and cached >= was_cached:  # an engine that restarted begins at 0
                step.engine_cached_tokens += cached - was_cached
                step.engine_prompt_tokens += computed - was_computed + cached - was_cached

    # --- DecisionObserver ---

    def decided(self, request: Request, features: Features, decision: Decision, took_s: float) -> None:
        self._now.reasons[decision.reason] += 1

    def response_started(self, decision: Decision, start: ResponseStart, since_decision_s: float) -> None:
        step = self._now
        if start.prompt_tokens is not None and start.cached_tokens is not None:
            step.prompt_tokens += start.prompt_tokens
            step.cached_tokens += start.cached_tokens
        streamed = decision.lease is not None and decision.lease.streamed
        if start.first_token and streamed and len(step.first_token_s) < SAMPLES:
            step.first_token_s.append(since_decision_s)

    def finished(self, decision: Decision, since_decision_s: float) -> None:
        pass


def _percentile(ascending: list[float], share: float) -> float | None:
    return round(ascending[int(share * (len(ascending) - 1))], 4) if ascending else None
