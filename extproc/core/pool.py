"""The replicas that serve one model: their ring, and the least loaded of them at any time."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from extproc.core.ring import Ring, position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from extproc.core.load import ReplicaLoad
    from extproc.core.settings import RouterSettings

SATURATED: Final = 1e15
"""Added to the work of a replica past the saturation line, so that it comes after every one below."""

TRAFFIC_HALF_LIFE_S: Final = 60.0
"""How fast a prefix's share of the traffic is forgotten: about the pace at which engines join and leave."""
TRAFFIC_PREFIXES: Final = 4096
"""Prefixes whose share is followed. The rest have shares below 1/4096, hence a home of one."""
EPOCH_HALF_LIVES: Final = 512
"""When counts are scaled back, long before a float's 1,023 doublings: every 8 hours."""
MAX_HOME: Final = 64
"""Largest home group. A prefix that needs more is everywhere."""


class LeastWork:
    """A tournament tree over one key per slot: O(log n) at most to set a key, the least is known at any time."""

    def __init__(self, size: int) -> None:
        self._leaves = 1 << max(0, size - 1).bit_length()
        self._keys = [math.inf] * self._leaves
        # By node, the root 1, the children of n 2n and 2n + 1: the slot that wins there.
        self._winners = [0] * self._leaves + list(range(self._leaves))
        for node in range(self._leaves - 1, 0, -1):
            self._winners[node] = self._winners[2 * node]

    def set(self, slot: int, key: float) -> None:
        keys, winners = self._keys, self._winners
        keys[slot] = key
        node, winner = slot + self._leaves, slot
        while node > 1:
            rival = winners[node ^ 1]
            if keys[rival] < key or (keys[rival] == key and rival < winner):
                winner, key = rival, keys[rival]
            node >>= 1
            if winners[node] == winner != slot:
                return  # the same as before, and with the same key
            winners[node] = winner

    def least(self) -> int:
        """The slot with the least key, the lowest of equals."""
        return self._winners[1]


class PrefixTraffic:
    """How much of the recent traffic each shared prefix has.

    Counts are not aged; new ones weigh more and more (forward decay: Cormode et al., ICDE 2009). Shares are the same,
    and reading one costs no arithmetic of time.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[bytes, float] = OrderedDict()
        self._total = 0.0
        self._epoch_s = -math.inf

    def note(self, signature: bytes | None, now_s: float) -> None:
        """A request has come: with this prefix, or None with none."""
        half_lives = (now_s - self._epoch_s) / TRAFFIC_HALF_LIFE_S
        if half_lives > EPOCH_HALF_LIVES:
            self._begin_epoch(now_s, math.exp2(-half_lives))
            half_lives = 0.0
        weight = math.exp2(half_lives)
        self._total += weight
        if signature is not None:
            self._counts[signature] = self._counts.get(signature, 0.0) + weight
            self._counts.move_to_end(signature)
            if len(self._counts) > TRAFFIC_PREFIXES:
                self._counts.popitem(last=False)

    def share(self, signature: bytes) -> float:
        """0..1"""
        count = self._counts.get(signature)
        return count / self._total if count else 0.0

    def _begin_epoch(self, now_s: float, scale: float) -> None:
        self._epoch_s = now_s
        self._total *= scale
        for signature, count in self._counts.items():
            self._counts[signature] = count * scale


class Pool:
    """A set of replicas that can stand in for each other. Draining ones are members only while there is no other."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._line = settings.saturation_in_flight
        self.ring = Ring(vnodes=settings.vnodes)
        self.traffic = PrefixTraffic()
        self.loads: dict[str, ReplicaLoad] = {}
        self.by_serial: dict[int, ReplicaLoad] = {}
        self._slots: list[ReplicaLoad] = []
        self._slot_of: dict[int, int] = {}
        self._tree = LeastWork(0)
        self._homes: dict[bytes, list[ReplicaLoad]] = {}

    def adopt(self, settings: RouterSettings) -> None:
        """Go by new settings from the next `replace` on; what was learned of the traffic stays."""
        if settings.vnodes != self._settings.vnodes:
            self.ring = Ring(vnodes=settings.vnodes)
        self._settings = settings
        self._line = settings.saturation_in_flight

    def replace(self, loads: Iterable[ReplicaLoad]) -> None:
        """Make these the members."""
        members = {load.replica.id: load for load in loads}
        self.ring.update({replica_id: load.replica.weight for replica_id, load in members.items()})
        self.loads = dict(sorted(members.items()))
        self._slots = list(self.loads.values())
        self.by_serial = {load.serial: load for load in self._slots}
        self._slot_of = {load.serial: slot for slot, load in enumerate(self._slots)}
        self._tree = LeastWork(len(self._slots))
        self._homes = {}
        for load in self._slots:
            self.changed(load)

    def changed(self, load: ReplicaLoad) -> None:
        """A member's load has changed."""
        slot = self._slot_of.get(load.serial)
        if slot is not None:
            work_tokens = load.waiting_tokens * load.pace
            saturated = load.in_flight + load.others_in_flight > self._line
            self._tree.set(slot, work_tokens + SATURATED if saturated else work_tokens)

    def is_saturated(self, load: ReplicaLoad) -> bool:
        return load.in_flight + load.others_in_flight > self._line

    def least(self) -> ReplicaLoad:
        """The member with the least expected work, one below the saturation line if there is any."""
        return self._slots[self._tree.least()]

    def order(self, key: bytes) -> Iterator[ReplicaLoad]:
        """A key's order of preference."""
        return map(self.loads.__getitem__, self.ring.walk(key))

    def first(self, key: bytes, count: int) -> list[ReplicaLoad]:
        """The first `count` of a key's order of preference."""
        loads = self.loads
        return [loads[replica_id] for replica_id in self.ring.first(key, count)]

    def home(self, signature: bytes) -> tuple[list[ReplicaLoad], int]:
        """A shared prefix's order of preference, and how many of its first are the prefix's home.

        The home grows with the prefix's share of the traffic: at half of it, it is half of the pool.
        """
        order = self._homes.get(signature)
        if order is None:
            order = self._homes[signature] = self.first(signature, MAX_HOME)
            if len(self._homes) > TRAFFIC_PREFIXES:
                del self._homes[next(iter(self._homes))]
        wanted = math.ceil(self.traffic.share(signature) * len(self._slots))
        return order, max(1, min(wanted, len(order)))

    def at_home(self, signature: bytes, key: bytes, count: int) -> list[ReplicaLoad]:
        """`count` members of a prefix's home; conversations under one prefix begin at different ones."""
        order, size = self.home(signature)
        if count >= size:
            return order[:size]
        begin = position(key) % size
        return (order[begin:size] + order)[:count]
