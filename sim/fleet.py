"""The event loop: arrivals, engines, and what the policy hears of them."""

from __future__ import annotations

import heapq
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

ENGINE, ARRIVAL, POLL, TICK = range(4)
"""Kinds of events. At one instant engines come first: a request that ends then is out of the way of one that comes."""


@dataclass(slots=True)
class Run:
    """What came of one workload under one policy.

    visits: in the order of sending. samples: (time, in-flight requests of each replica), at each poll.
    """

    policy: str
    visits: list[Visit]
    engines: list[Engine]
    duration_s: float = 0.0
    state_entries: int = 0
    samples: list[tuple[float, list[int]]] = field(default_factory=list)


def simulate(
    workload: Workload,
    policy: Policy,
    replicas: int,
    model: EngineModel | None = None,
    poll_s: float = POLL_S,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Play a workload. Deterministic. progress: called now and then with the number of requests finished."""
    engines = [Engine(model or EngineModel(), workload.block_tokens) for _ in range(replicas)]
    run = Run(policy.name, [], engines)
    policy.start(engines)
    serial = 0
    events: list[tuple[float, int, int, Turn | int]] = [(0.0, POLL, 0, 0), (0.0, TICK, 0, 0)]

    def push(at_s: float, kind: int, what: Turn | int) -> None:
        nonlocal serial
        serial += 1
        heapq.heappush(events, (at_s, kind, serial, what))

    for turn in workload.turns:
        push(turn.at_s, ARRIVAL, turn)
    left, open_visits = len(workload.turns), 0
    while left or open_visits:
        now_s, kind, _, what = heapq.heappop(events)
        if kind == ENGINE:
            assert isinstance(what, int)
            engine = engines[what]
            if engine.next_s != now_s:
                continue  # an arrival shortened the stride
            started, finished = engine.advance()
            if engine.next_s < float("inf"):
                push(engine.next_s, ENGINE, what)
            for visit in started:
                policy.first_token(visit, now_s)
            for visit in finished:
                open_visits -= 1
                policy.finish(visit, now_s)
                if visit.turn.then is not None:
                    left += 1
                    push(now_s + visit.turn.then.at_s, ARRIVAL, visit.turn.then)
        elif kind == ARRIVAL:
            assert isinstance(what, Turn)
            visit = Visit(what, now_s)
            visit.replica = policy.choose(visit, now_s)
            engine = engines[visit.replica]
            before_s = engine.next_s
            engine.submit(visit, now_s)
            if engine.next_s != before_s:
                push(engine.next_s, ENGINE, visit.replica)
            run.visits.append(visit)
            left -= 1
            open_visits += 1
        elif kind == POLL:
            policy.poll(now_s)
            run.samples.append((now_s, [engine.in_flight for engine in engines]))
            push(now_s + poll_s, POLL, 0)
            if progress is not None:
                progress(len(run.visits) - open_visits)
        else:
            policy.tick(now_s)
            push(now_s + TICK_S, TICK, 0)
        run.duration_s = now_s
    run.state_entries = policy.state_entries
    return run
