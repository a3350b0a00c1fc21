"""Policies: which of a pool's replicas gets the request.

`ExpectedWork` is the idea of this router. It weighs a few candidates:

    the first of the conversation's order of preference     level 2 of the ring
    members of the home group of the shared prefix          level 1 of the ring
    the replicas remembered to hold most of the prompt      placement memory
    the one with the least work of all

and takes the one on which the request's first token is nearest:

    (outstanding prefill + this request's uncached tokens + decode_tokens x in-flight) / speed

so affinity is no rule of its own: a replica that holds the prompt has less to do for it. One past the saturation line
is left out while any is below. Differences under `tie_tokens` are ties and keep the order above.

`RingSpillover` and `BoundedLoad` are simpler rules from the literature, for comparison.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

from extproc.core.decision import Candidate, Reason
from extproc.core.ring import position
from extproc.core.settings import PolicyName

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.core.features import Features
    from extproc.core.load import ReplicaLoad
    from extproc.core.placement import Holding, PlacementMemory
    from extproc.core.pool import Pool
    from extproc.core.settings import RouterSettings


class Question(NamedTuple):
    """One request, as policies see it.

    key: its place on the ring; without affinity a different one each time.
    only: endpoints that may be chosen, None: any.
    """

    features: Features
    key: bytes
    prompt_tokens: float
    bytes_per_token: float
    now_s: float
    only: frozenset[str] | None

    def allows(self, load: ReplicaLoad) -> bool:
        return self.only is None or load.replica.endpoint in self.only


class Choice(NamedTuple):
    """chosen None: no replica, or (reason SHED) none that should take it."""

    chosen: ReplicaLoad | None
    reason: Reason
    primary: ReplicaLoad | None = None
    weighed: tuple[Candidate, ...] = ()
    matched_bytes: int = 0
    uncached_tokens: float = 0.0


class Policy(Protocol):
    """Chooses; changes nothing."""

    def choose(self, pool: Pool, question: Question) -> Choice: ...


class ExpectedWork:
    """The least expected work among the candidates."""

    def __init__(self, settings: RouterSettings, memory: PlacementMemory) -> None:
        self._settings = settings
        self._memory = memory

    def choose(self, pool: Pool, question: Question) -> Choice:
        levels = self._levels(question.features)
        candidates = self._candidates(pool, question, levels)
        if not candidates:
            return Choice(None, Reason.NO_REPLICA)
        known = self._memory.holders(question.key)
        weighed = [self._weigh(load, question, levels, known) for load in candidates]
        below = [not pool.is_saturated(load) for load in candidates]
        if not any(below):
            if self._settings.shed:
                return Choice(None, Reason.SHED, candidates[0], tuple(w.candidate() for w in weighed))
            below = [True] * len(candidates)
        # The least cost; within a tie the first in order.
        limit = min(w.cost for w, is_below in zip(weighed, below, strict=True) if is_below)
        limit += self._settings.tie_tokens
        index = next(i for i, w in enumerate(weighed) if below[i] and w.cost <= limit)
        return Choice(
            chosen=candidates[index],
            reason=self._reason(pool, question, weighed, index, known),
            primary=candidates[0],
            weighed=tuple(w.candidate() for w in weighed),
            matched_bytes=weighed[index].matched_bytes,
            uncached_tokens=weighed[index].uncached_tokens,
        )

    def _levels(self, features: Features) -> list[tuple[int, dict[int, Holding]]]:
        """(offset in bytes, who was sent it) of each rung that anybody was sent, deepest first."""
        holders = self._memory.holders
        return [(rung.offset_bytes, held) for rung in reversed(features.rungs) if (held := holders(rung.signature))]

    def _candidates(
        self, pool: Pool, question: Question, levels: list[tuple[int, dict[int, Holding]]]
    ) -> list[ReplicaLoad]:
        settings, features = self._settings, question.features
        found: dict[int, ReplicaLoad] = {}

        def add(loads: Iterable[ReplicaLoad], at_most: int) -> None:
            if at_most <= 0:
                return
            for load in loads:
                if question.allows(load):
                    found[load.serial] = load
                    at_most -= 1
                    if not at_most:
                        return

        add(pool.order(question.key), settings.session_candidates)
        if features.system_rung is not None and settings.home_candidates:
            signature = features.system_rung.signature
            size = pool.home_size(signature, question.now_s)
            home = [pool.loads[replica_id] for replica_id in pool.ring.first(signature, size)]
            # Conversations under one prefix begin at different members of its home.
            turn = position(question.key) % len(home) if home else 0
            add(home[turn:] + home[:turn], settings.home_candidates)
        by_serial = pool.by_serial
        left = settings.holder_candidates
        for _, held in levels:
            for serial in reversed(held):
                if left and serial not in found and (load := by_serial.get(serial)) and question.allows(load):
                    found[serial] = load
                    left -= 1
            if not left:
                break
        if question.only is None:
            if pool.loads:
                add((pool.least(),), 1)
        else:
            # Rare (a gateway that names a subset): all of it is weighed.
            add(pool.loads.values(), len(pool.loads))
        return list(found.values())

    def _weigh(
        self,
        load: ReplicaLoad,
        question: Question,
        levels: list[tuple[int, dict[int, Holding]]],
        known: dict[int, Holding],
    ) -> Weighed:
        matched = 0
        for offset, held in levels:
            holding = held.get(load.serial)
            if holding is not None and load.holds(holding.stamp_tokens):
                matched = offset
                break
        conversation = known.get(load.serial)
        # A conversation that was here is here up to its last length, which lies between two rungs. Past the next
        # rung it can't be: the prompt under this session is another one now.
        if conversation is not None and matched < conversation.length_bytes < 2 * matched:
            matched = min(conversation.length_bytes, question.features.prompt_bytes)
        uncached = max(0.0, question.prompt_tokens - matched / question.bytes_per_token)
        cost = load.work_tokens(question.now_s, uncached * (1.0 + self._settings.reuse_weight))
        return Weighed(load, matched, uncached, cost)

    def _reason(
        self, pool: Pool, question: Question, weighed: list[Weighed], index: int, known: dict[int, Holding]
    ) -> Reason:
        """Named from the home's point of view: the replica that holds the conversation, or the ring's first."""
        if question.features.conversation_key is None:
            return Reason.NO_AFFINITY
        chosen = weighed[index]
        holders = [w for w in weighed if w.load.serial in known]
        home = max(holders, key=lambda w: w.matched_bytes) if holders else weighed[0]
        if chosen is not home and pool.is_saturated(home.load):
            return Reason.SPILLOVER
        at_home = chosen is home or chosen is weighed[0] or chosen.load.serial in known
        if at_home and question.features.conversation_source != "prompt":
            return Reason.SESSION
        if chosen.matched_bytes > 0 and (at_home or chosen.matched_bytes >= home.matched_bytes):
            return Reason.PREFIX
        return Reason.SPREAD if holders or any(w.matched_bytes for w in weighed) else Reason.COLD


class Weighed(NamedTuple):
    """A candidate in the balance. cost: expected work in tokens."""

    load: ReplicaLoad
    matched_bytes: int
    uncached_tokens: float
    cost: float

    def candidate(self) -> Candidate:
        replica = self.load.replica
        return Candidate(replica.id, replica.endpoint, int(self.uncached_tokens), self.cost, self.load.total_in_flight)


class RingSpillover:
    """The article's literal rule: the ring's first, unless it is past the line, else the least loaded."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings

    def choose(self, pool: Pool, question: Question) -> Choice:
        primary = next(filter(question.allows, pool.order(question.key)), None)
        if primary is None:
            return Choice(None, Reason.NO_REPLICA)
        chosen = primary
        if pool.is_saturated(primary):
            chosen = min(filter(question.allows, pool.loads.values()), key=lambda load: load.total_in_flight)
            if pool.is_saturated(chosen) and self._settings.shed:
                return Choice(None, Reason.SHED, primary)
        return _ring_choice(chosen, primary, question)


class BoundedLoad:
    """Consistent hashing with bounded loads (arXiv 1608.01350): the first in ring order that has room."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings

    def choose(self, pool: Pool, question: Question) -> Choice:
        order = [load for load in pool.order(question.key) if question.allows(load)]
        if not order:
            return Choice(None, Reason.NO_REPLICA)
        if self._settings.shed and all(map(pool.is_saturated, order)):
            return Choice(None, Reason.SHED, order[0])
        in_flight = 1 + sum(load.total_in_flight for load in order)
        weight = sum(load.replica.weight for load in order)
        fair = self._settings.bounded_load_factor * in_flight / weight

        def has_room(load: ReplicaLoad) -> bool:
            return load.total_in_flight + 1 <= math.ceil(fair * load.replica.weight)

        # Somebody has: were all full, their sum would exceed the factor times itself.
        return _ring_choice(next(filter(has_room, order), order[0]), order[0], question)


def _ring_choice(chosen: ReplicaLoad, primary: ReplicaLoad, question: Question) -> Choice:
    if question.features.conversation_key is None:
        reason = Reason.NO_AFFINITY
    elif chosen is not primary:
        reason = Reason.SPILLOVER
    elif question.features.conversation_source == "prompt":
        reason = Reason.PREFIX
    else:
        reason = Reason.SESSION
    # Nothing is remembered here, so nothing is known to be cached.
    cost = chosen.work_tokens(question.now_s, question.prompt_tokens)
    weighed = Weighed(chosen, 0, question.prompt_tokens, cost).candidate()
    return Choice(chosen, reason, primary, (weighed,), 0, question.prompt_tokens)


def make_policy(settings: RouterSettings, memory: PlacementMemory) -> Policy:
    match settings.policy:
        case PolicyName.EXPECTED_WORK:
            return ExpectedWork(settings, memory)
        case PolicyName.RING_SPILLOVER:
            return RingSpillover(settings)
        case PolicyName.BOUNDED_LOAD:
            return BoundedLoad(settings)
