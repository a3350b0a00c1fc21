"""The event loop: arrivals, engines, and what the policy hears of them."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from sim.engine import Engine, EngineModel
from sim.turn import Turn, Visit

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.policies.policy import Policy
    from sim.workload import Workload

POLL_S: Final = 0.5
"""How often engines' metrics are read."""
TICK_S: Final = 0.1
"""How often a router lets time pass."""

STRIDE, ARRIVAL, POLL, TICK = range(4)
"""Kinds of events. At one instant engines come first: a request that ends then is out of the way of one that comes."""


@dataclass(slots=True)
class Run:
    """What came of one workload under one policy.

    visits: in the order of sending. samples: (time, in-flight requests of each replica), at each poll.
    """

    policy: str
    engines: list[Engine]
    visits: list[Visit] = field(default_factory=list)
    samples: list[tuple[float, list[int]]] = field(default_factory=list)
    duration_s: float = 0.0
    state_entries: int = 0


def simulate(
    workload: Workload,
    policy: Policy,
    replicas: int,
    model: EngineModel | None = None,
    poll_s: float = POLL_S,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Play a workload. Deterministic. progress: called at each poll with the number of requests finished."""
    fleet = _Fleet(workload, policy, replicas, model or EngineModel(), poll_s, progress or (lambda _: None))
    while fleet.open:
        fleet.step()
    fleet.run.state_entries = policy.state_entries
    return fleet.run


class _Fleet:
    """open: turns that are known of and not finished."""

    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        replicas: int,
        model: EngineModel,
        poll_s: float,
        progress: Callable[[int], None],
    ) -> None:
        self.run = Run(policy.name, [Engine(model, workload.block_tokens) for _ in range(replicas)])
        self.open = len(workload.turns)
        self._finished = 0
        self._policy = policy
        self._poll_s = poll_s
        self._progress = progress
        self._serial = 0
        self._events: list[tuple[float, int, int, Turn | int]] = []
        policy.start(self.run.engines)
        self._push(0.0, POLL)
        self._push(0.0, TICK)
        for turn in workload.turns:
            self._push(turn.at_s, ARRIVAL, turn)

    def step(self) -> None:
        now_s, kind, _, what = heapq.heappop(self._events)
        if kind == STRIDE:
            assert isinstance(what, int)
            self._advance(what, now_s)
        elif kind == ARRIVAL:
            assert isinstance(what, Turn)
            self._arrive(what, now_s)
        elif kind == POLL:
            self._policy.poll(now_s)
            self.run.samples.append((now_s, [engine.in_flight for engine in self.run.engines]))
            self._progress(self._finished)
            self._push(now_s + self._poll_s, POLL)
        else:
            self._policy.tick(now_s)
            self._push(now_s + TICK_S, TICK)
        self.run.duration_s = now_s

    def _advance(self, replica: int, now_s: float) -> None:
        engine = self.run.engines[replica]
        if engine.next_s != now_s:
            return  # an arrival has shortened this stride
        started, finished = engine.advance()
        if engine.next_s < math.inf:
            self._push(engine.next_s, STRIDE, replica)
        for visit in started:
            self._policy.first_token(visit, now_s)
        for visit in finished:
            self._policy.finish(visit, now_s)
            self.open -= 1
            self._finished += 1
            if (following := visit.turn.then) is not None:
                self.open += 1
                self._push(now_s + following.at_s, ARRIVAL, following)

    def _arrive(self, turn: Turn, now_s: float) -> None:
        visit = Visit(turn, now_s)
        visit.replica = self._policy.choose(visit, now_s)
        engine = self.run.engines[visit.replica]
        before_s = engine.next_s
        engine.submit(visit, now_s)
        if engine.next_s != before_s:
            self._push(engine.next_s, STRIDE, visit.replica)
        self.run.visits.append(visit)

    def _push(self, at_s: float, kind: int, what: Turn | int = 0) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at_s, kind, self._serial, what))
