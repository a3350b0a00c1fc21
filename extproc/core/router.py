"""The router: membership and load in, decisions out.

One object, used by one thread. `decide` reads loads and takes its lease without giving anything else a chance to run,
so a burst of requests sees every earlier one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.core.decision import Decision, Reason
from extproc.core.lease import Lease
from extproc.core.load import ReplicaLoad
from extproc.core.placement import PlacementMemory
from extproc.core.policy import Choice, Question, make_policy
from extproc.core.pool import Pool
from extproc.core.settings import PolicyName, RouterSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from extproc.core.features import Features
    from extproc.core.replica import EngineLoad, Replica

__all__ = ["PolicyName", "Router", "RouterSettings"]

LEARNING_MEMORY = 0.99
"""Weight of the past in the bytes-per-token average: about the last 100 requests."""


ANYONE: Final = ("*", None)
"""The pool of all replicas; no path begins so."""

TRAFFIC_MEMORY = 0.98
"""Weight of the past at each tick in what is known of the traffic as a whole: about the last 5 s."""


class Router:
    """Routes requests to replicas. All times are monotonic seconds.

    membership_version: grows with every change of the membership.
    membership_stale: set by whoever feeds the membership while the feed is silent; shown in every decision.
    """

    def __init__(self, settings: RouterSettings | None = None) -> None:
        self.settings = settings or RouterSettings()
        self.membership_version = 0
        self.membership_stale = False
        self.memory = PlacementMemory(self.settings.placement_entries, self.settings.placement_bytes)
        self._policy = make_policy(self.settings, self.memory)
        self._loads: dict[str, ReplicaLoad] = {}
        self._pools: dict[tuple[str, str | None], Pool] = {ANYONE: Pool(self.settings)}
        self._prefixes: list[str] = []
        self._told_by_model: set[str] = set()
        self._pools_of: dict[int, tuple[Pool, ...]] = {}
        self._leases: dict[Lease, None] = {}  # in the order of their decisions
        self._serial = 0
        self._lonely = 0
        self._others_share = 0.0
        self._queue = 0.0
        self._load_stale = False
        self._bytes = self.settings.bytes_per_token
        self._tokens = 1.0

    # ------------------------------------------------------------------------------------------ membership and load

    def set_members(self, replicas: Iterable[Replica], now_s: float) -> None:
        """Replace the membership. What stays keeps its load; what left is forgotten; an id that comes back is new."""
        wanted = {replica.id: replica for replica in replicas}
        if {replica_id: load.replica for replica_id, load in self._loads.items()} == wanted:
            return
        first = not self._loads
        loads: dict[str, ReplicaLoad] = {}
        for replica_id, replica in wanted.items():
            load = self._loads.get(replica_id)
            if load is None or load.replica.endpoint != replica.endpoint:
                self._serial += 1
                load = ReplicaLoad(replica, self._serial, self.settings, now_s, warm=first)
            elif load.replica.draining and not replica.draining:
                load.start_slowly(now_s)  # it was unwell: it may have restarted, or fail again
            load.become(replica, now_s)
            loads[replica_id] = load
        self._loads = loads
        self._rebuild_pools()
        self.membership_version += 1

    def _rebuild_pools(self) -> None:
        """One pool for each set of replicas that answers the same paths and serves the same model."""
        loads = self._loads.values()
        members: dict[tuple[str, str | None], tuple[ReplicaLoad, ...]] = {ANYONE: _ready(loads)}
        for prefix in sorted({load.replica.route_prefix for load in loads}):
            answering = [load for load in loads if load.replica.route_prefix == prefix]
            members[prefix, None] = _ready(answering)
            for model in sorted({model for load in answering for model in load.replica.models}):
                serving = [load for load in answering if not load.replica.models or model in load.replica.models]
                members[prefix, model] = _ready(serving)
        # The longest first, since it says most.
        self._prefixes = sorted({prefix for prefix, _ in members} - {"", ANYONE[0]}, key=len, reverse=True)
        self._told_by_model = {prefix for prefix, model in members if members[prefix, model] != members[prefix, None]}
        built: dict[tuple[ReplicaLoad, ...], Pool] = {}
        pools: dict[tuple[str, str | None], Pool] = {}
        for name, group in members.items():
            if group not in built:
                # A pool that had the model keeps its ring and its traffic; each pool goes to one group only.
                old = self._pools.get(name)
                taken = {id(pool) for pool in built.values()}
                pool = old if old is not None and id(old) not in taken else Pool(self.settings)
                pool.replace(group)
                built[group] = pool
            pools[name] = built[group]
        self._pools = pools
        self._pools_of = {
            load.serial: tuple(pool for pool in built.values() if load.serial in pool.by_serial) for load in loads
        }

    def set_load(self, replica_id: str, engine: EngineLoad, now_s: float) -> None:
        """Take in an engine's own figures; those of unknown replicas are ignored."""
        load = self._loads.get(replica_id)
        if load is not None:
            load.report(engine, now_s)
            self._changed(load)

    def replace_settings(self, settings: RouterSettings, now_s: float) -> None:
        """Change the settings under way. Leases, memory and what was learned stay."""
        self.settings = settings
        self.memory.resize(settings.placement_entries, settings.placement_bytes)
        self._policy = make_policy(settings, self.memory)
        for load in self._loads.values():
            load.adopt(settings)
            load.refresh(now_s)
        for pool in set(self._pools.values()):
            pool.adopt(settings)
        self._rebuild_pools()

    def tick(self, now_s: float) -> None:
        """Let time pass: call about every 100 ms. Drains ledgers, drops stale figures, releases leaked leases."""
        limit_s = self.settings.lease_limit_s
        for lease in list(self._leases):
            if now_s - lease.decided_s <= limit_s:
                break
            self.finish(lease, now_s)
        stale = False
        for load in self._loads.values():
            if not load.is_at_rest(now_s):
                stale = load.pass_time(now_s) or stale
                self._changed(load)
        self._load_stale = stale
        self._follow_traffic()

    # --------------------------------------------------------------------------------------------------- decisions

    def decide(self, features: Features, now_s: float, only: frozenset[str] | None = None) -> Decision:
        """Choose a replica and take a lease on it.

        only: endpoints that may be chosen ("ip:port"), None: any.
        """
        pool = self._pool(features)
        question = self._question(features, now_s, only)
        choice = self._policy.choose(pool, question)
        if choice.chosen is None:
            return self._decision(question, choice, None)
        lease = self._take(choice.chosen, question, choice)
        self._remember(pool, choice.chosen, question)
        return self._decision(question, choice, lease)

    def needs_model(self, path: str) -> bool:
        """Whether requests on this path go to other replicas for one model than for another."""
        return self._prefix(path) in self._told_by_model

    def first_token(
        self, lease: Lease, now_s: float, prompt_tokens: int | None = None, cached_tokens: int | None = None
    ) -> None:
        """The answer has begun, so the prefill is over. The engine's own counts correct the estimates."""
        if not lease.open:
            return
        if prompt_tokens and prompt_tokens > 0 and lease.prompt_bytes:
            self._bytes = LEARNING_MEMORY * self._bytes + lease.prompt_bytes
            self._tokens = LEARNING_MEMORY * self._tokens + prompt_tokens
        if prompt_tokens is not None and cached_tokens is not None:
            computed = float(max(0, prompt_tokens - cached_tokens))
            lease.load.computed_tokens += computed - lease.uncached_tokens
            lease.uncached_tokens = computed
        lease.load.first_token(lease, now_s)
        self._changed(lease.load)

    def finish(self, lease: Lease, now_s: float) -> None:
        """The stream has ended, whichever way. Idempotent."""
        if not lease.open:
            return
        lease.open = False
        del self._leases[lease]
        lease.load.release(lease, now_s)
        self._changed(lease.load)

    # ------------------------------------------------------------------------------------------------- for observers

    def in_flight(self, replica_id: str) -> int:
        """Own open leases on a replica; 0 for an unknown one."""
        load = self._loads.get(replica_id)
        return load.in_flight if load is not None else 0

    @property
    def loads(self) -> Mapping[str, ReplicaLoad]:
        """Replica id -> its load, to look at."""
        return self._loads

    @property
    def open_leases(self) -> int:
        return len(self._leases)

    @property
    def bytes_per_token(self) -> float:
        """Learned from the engines' own counts."""
        return self._bytes / self._tokens

    def preference(self, features: Features) -> list[str]:
        """The whole order of preference of a request's conversation: replica ids; empty without affinity."""
        if features.conversation_key is None:
            return []
        return list(self._pool(features).ring.walk(features.conversation_key))

    def weigh(self, features: Features, now_s: float) -> Decision:
        """What `decide` would say, without taking a lease or remembering anything."""
        question = self._question(features, now_s, None)
        return self._decision(question, self._policy.choose(self._pool(features), question), None)

    # ------------------------------------------------------------------------------------------------------ internals

    def _follow_traffic(self) -> None:
        others = sum(load.others_in_flight for load in self._loads.values())
        share = others / (others + len(self._leases)) if others else 0.0
        queue = sum(load.queued for load in self._loads.values()) / max(1, len(self._loads))
        self._others_share += (1.0 - TRAFFIC_MEMORY) * (share - self._others_share)
        self._queue += (1.0 - TRAFFIC_MEMORY) * (queue - self._queue)

    def _prefix(self, path: str) -> str:
        return next((each for each in self._prefixes if path.startswith(each + "/")), "") if self._prefixes else ""

    def _pool(self, features: Features) -> Pool:
        prefix = self._prefix(features.path)
        # A model that nobody names (an alias, an adapter loaded on the fly): any replica may know it.
        pools = self._pools
        return pools.get((prefix, features.model)) or pools.get((prefix, None)) or pools[ANYONE]

    def _question(self, features: Features, now_s: float, only: frozenset[str] | None) -> Question:
        key = features.conversation_key
        if key is None:
            # Spread what has no affinity over the ring, the same way in every run.
            key = (self._lonely * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little")  # golden ratio: even steps
        # No engine takes more than its cache holds, whatever length a client declares.
        prompt_tokens = min(features.prompt_bytes / self.bytes_per_token, self.settings.kv_capacity_tokens)
        return Question(features, key, prompt_tokens, now_s, only, self._others_share, self._queue)

    def _take(self, load: ReplicaLoad, question: Question, choice: Choice) -> Lease:
        lease = Lease(
            load,
            question.now_s,
            question.features.prompt_bytes,
            question.prompt_tokens,
            choice.uncached_tokens,
            question.features.streamed,
        )
        load.take(lease, question.now_s)
        self._leases[lease] = None
        self._changed(load)
        return lease

    def _remember(self, pool: Pool, load: ReplicaLoad, question: Question) -> None:
        features, stamp = question.features, load.computed_tokens
        pool.traffic.note(features.system_rung.signature if features.system_rung else None, question.now_s)
        if features.conversation_key is None:
            self._lonely += 1
            return
        self.memory.remember(features.rungs, load.serial, stamp)
        self.memory.remember([(features.prompt_bytes, features.conversation_key)], load.serial, stamp)

    def _changed(self, load: ReplicaLoad) -> None:
        for pool in self._pools_of.get(load.serial, ()):
            pool.changed(load)

    def _decision(self, question: Question, choice: Choice, lease: Lease | None) -> Decision:
        replica = choice.chosen.replica if choice.chosen is not None else None
        with_affinity = question.features.conversation_key is not None
        return Decision(  # by place, since names cost a third more
            choice.reason,
            lease,
            replica.endpoint if replica else None,
            replica.id if replica else None,
            choice.primary.replica.id if choice.primary and with_affinity else None,
            choice.weighed,
            choice.matched_bytes,
            int(question.prompt_tokens),
            self.membership_stale or self._load_stale,
            self.membership_version,
            self.settings.retry_after_s if replica is None and choice.reason is Reason.SHED else None,
        )


def _ready(loads: Iterable[ReplicaLoad]) -> tuple[ReplicaLoad, ...]:
    """Those that are not draining; all, where all are: a busy replica is better than none."""
    all_loads = tuple(loads)
    return tuple(load for load in all_loads if not load.replica.draining) or all_loads
