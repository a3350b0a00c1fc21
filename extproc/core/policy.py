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
from operator import itemgetter
from typing import TYPE_CHECKING, Final, Protocol

from extproc.core.decision import Reason, Weighed
from extproc.core.placement import HOLDERS, NOBODY
from extproc.core.settings import PolicyName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.features import Features
    from extproc.core.load import ReplicaLoad
    from extproc.core.placement import Holding, Level, PlacementMemory
    from extproc.core.pool import Pool
    from extproc.core.settings import RouterSettings


MATCHED: Final = itemgetter(1)
"""Of a `Weighed`."""


class Question:
    """One request, as policies see it.

    key: its place on the ring; without affinity a different one each time.
    only: endpoints that may be chosen, None: any.
    others_share: how much of the fleet's traffic comes by other routers, 0..1.
    queue: requests of ours per replica whose first token is still to come, on the average.
    """

    __slots__ = ("features", "key", "now_s", "only", "others_share", "prompt_tokens", "queue")

    def __init__(
        self,
        features: Features,
        key: bytes,
        prompt_tokens: float,
        now_s: float,
        only: frozenset[str] | None,
        others_share: float,
        queue: float,
    ) -> None:
        self.features = features
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.now_s = now_s
        self.only = only
        self.others_share = others_share
        self.queue = queue

    def allows(self, load: ReplicaLoad) -> bool:
        return self.only is None or load.replica.endpoint in self.only


class Choice:
    """chosen None: no replica, or (reason SHED) none that should take it."""

    __slots__ = ("chosen", "matched_bytes", "primary", "reason", "uncached_tokens", "weighed")

    def __init__(
        self,
        chosen: ReplicaLoad | None,
        reason: Reason,
        primary: ReplicaLoad | None = None,
        weighed: Sequence[Weighed] = (),
        matched_bytes: int = 0,
        uncached_tokens: float = 0.0,
    ) -> None:
        self.chosen = chosen
        self.reason = reason
        self.primary = primary
        self.weighed = weighed
        self.matched_bytes = matched_bytes
        self.uncached_tokens = uncached_tokens


class Policy(Protocol):
    """Chooses; changes nothing."""

    def choose(self, pool: Pool, question: Question) -> Choice: ...


class ExpectedWork:
    """The least expected work among the candidates."""

    def __init__(self, settings: RouterSettings, memory: PlacementMemory) -> None:
        self._settings = settings
        self._line = settings.saturation_in_flight
        self._memory = memory

    def choose(self, pool: Pool, question: Question) -> Choice:
        levels = self._memory.known(question.features.rungs)
        candidates = self._candidates(pool, question, levels)
        if not candidates:
            return Choice(None, Reason.NO_REPLICA)
        known = self._memory.holders(question.key)
        weighed = self._weigh(question, candidates, levels, known)
        chosen = self._least(weighed, self._line)
        if chosen is None:
            if self._settings.shed:
                return Choice(None, Reason.SHED, candidates[0], weighed)
            chosen = self._least(weighed, math.inf) or weighed[0]
        load, matched_bytes, uncached_tokens, _, _ = chosen
        reason = self._reason(question, weighed, chosen, known)
        return Choice(load, reason, candidates[0], weighed, matched_bytes, uncached_tokens)

    def _least(self, weighed: list[Weighed], line: float) -> Weighed | None:
        """The least cost below the saturation line, within a tie the first in order; None if nobody is below."""
        least = math.inf
        for _, _, _, cost, in_flight in weighed:
            if cost < least and in_flight <= line:
                least = cost
        limit = least + self._settings.tie_tokens
        for candidate in weighed:
            if candidate[3] <= limit and candidate[4] <= line:
                return candidate
        return None

    def _candidates(self, pool: Pool, question: Question, levels: list[Level]) -> list[ReplicaLoad]:
        """Those worth weighing, without repetition, in order of preference."""
        settings, system_rung = self._settings, question.features.system_rung
        if question.only is not None:
            # Rare (a gateway that names a subset), so all of it is weighed.
            return [load for load in pool.order(question.key) if load.replica.endpoint in question.only]
        if not pool.loads:
            return []
        candidates = pool.first(question.key, settings.session_candidates)
        if system_rung is not None:
            candidates += pool.at_home(system_rung.signature, question.key, settings.home_candidates)
        found = {load.serial: load for load in candidates}
        by_serial, wanted, seen = pool.by_serial, len(found) + settings.holder_candidates, 0
        for _, _, held in levels:
            if len(held) == seen:
                continue  # who holds more holds less, so these are the same replicas
            seen = len(held)
            for serial in reversed(held):
                if len(found) >= wanted:
                    break
                if serial not in found and serial in by_serial:
                    found[serial] = by_serial[serial]
        least = pool.least()
        found[least.serial] = least
        return list(found.values())

    def _weigh(
        self, question: Question, candidates: list[ReplicaLoad], levels: list[Level], known: dict[int, Holding]
    ) -> list[Weighed]:
        prompt_bytes, prompt_tokens = question.features.prompt_bytes, question.prompt_tokens
        tokens_per_byte = prompt_tokens / prompt_bytes if prompt_bytes else 0.0
        emphasis = 1.0 + self._settings.reuse_weight * question.queue
        # A conversation that is new here may be an old one of other routers; then it is where the ring says first.
        # And one that is new everywhere should go there, for them to find it.
        presumed = candidates[0] if question.others_share and not known else None
        # Who holds more of a prompt holds less of it too. Only a rung with all the holders it may have forgets some.
        shortest = levels[-1][2] if levels else NOBODY
        forgetful = len(shortest) == HOLDERS
        weighed: list[Weighed] = []
        for load in candidates:
            serial, matched = load.serial, 0
            oldest_tokens = load.computed_tokens - load.capacity_tokens
            for offset_bytes, next_bytes, held in levels if forgetful or serial in shortest else ():
                holding = held.get(serial)
                if holding is not None and holding[1] >= oldest_tokens:
                    matched = offset_bytes
                    if serial in known and matched < known[serial][0] <= next_bytes:
                        # A conversation that was here is here up to its last length, which lies between two rungs.
                        # A length past the next rung is that of another prompt under the same key.
                        matched = min(known[serial][0], prompt_bytes)
                    break
            uncached = prompt_tokens - matched * tokens_per_byte if matched < prompt_bytes else 0.0
            expected = uncached if load is not presumed else uncached * (1.0 - question.others_share)
            cost = (load.waiting_tokens + expected * emphasis) * load.pace
            weighed.append((load, matched, uncached, cost, load.in_flight + load.others_in_flight))
        return weighed

    def _reason(self, question: Question, weighed: list[Weighed], chosen: Weighed, known: dict[int, Holding]) -> Reason:
        """Named from the home's point of view: the replica that holds the conversation, or else the ring's first."""
        features = question.features
        if features.conversation_key is None:
            return Reason.NO_AFFINITY
        load, matched, _, _, _ = chosen
        homes = [candidate for candidate in weighed if candidate[0].serial in known] if known else []
        home, home_matched, _, _, home_in_flight = max(homes, key=MATCHED) if homes else weighed[0]
        if load is not home and home_in_flight > self._line:
            return Reason.SPILLOVER
        at_home = load is home or load is weighed[0][0] or load.serial in known
        if at_home and features.conversation_source != "prompt":
            return Reason.SESSION
        if matched and (at_home or matched >= home_matched):
            return Reason.PREFIX
        return Reason.SPREAD if homes or any(m for _, m, _, _, _ in weighed) else Reason.COLD


class RingSpillover:
    """The article's literal rule: the ring's first, unless it has more than 16 in flight, else the least loaded."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings

    def choose(self, pool: Pool, question: Question) -> Choice:
        primary = next(filter(question.allows, pool.order(question.key)), None)
        if primary is None:
            return Choice(None, Reason.NO_REPLICA)
        chosen = primary
        if primary.total_in_flight > self._settings.spillover_in_flight:
            chosen = min(filter(question.allows, pool.loads.values()), key=lambda load: load.total_in_flight)
            if self._settings.shed and chosen.total_in_flight > self._settings.spillover_in_flight:
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
    cost = chosen.work_tokens(question.prompt_tokens)
    weighed = (chosen, 0, question.prompt_tokens, cost, chosen.total_in_flight)
    return Choice(chosen, reason, primary, [weighed], 0, question.prompt_tokens)


def make_policy(settings: RouterSettings, memory: PlacementMemory) -> Policy:
    match settings.policy:
        case PolicyName.EXPECTED_WORK:
            return ExpectedWork(settings, memory)
        case PolicyName.RING_SPILLOVER:
            return RingSpillover(settings)
        case PolicyName.BOUNDED_LOAD:
            return BoundedLoad(settings)
