"""A weighted consistent-hash ring with virtual nodes.

Both levels of routing use it: level 1 asks for a shared prefix (its home group), level 2 for a conversation (its
order of preference). A replica's points come from its id alone, so any two routers with the same membership agree,
in whatever order they learned of it, and a join or a leave moves only the keys that it must.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VNODES: Final = 320
"""Points per replica of weight 1. A share's relative deviation is 1/sqrt(points) = 5.6%, and the busiest of 64
replicas is some 2.4 deviations above the mean: max/mean 1.14, and at most 1.24 in 400 fleets. Half as many points
leave one fleet in ten above 1.25 (tests/core/test_ring.py counts exact arcs)."""

_POINT_BYTES: Final = 8
_unpack_place = struct.Struct("<Q").unpack_from
_SLOT_MASK: Final = 0xFFFF
_PLACE_MASK: Final = 2**64 - 1 - _SLOT_MASK


def position(key: bytes) -> int:
    """Where a key lies: its first 8 bytes. Keys are BLAKE3 signatures, hence uniform already."""
    place: int
    (place,) = _unpack_place(key)
    return place


def points(replica_id: str, count: int) -> tuple[int, ...]:
    """The positions of a replica's virtual nodes.

    One BLAKE3 output of `count` x 8 bytes rather than a hash per "name + index": no two nodes can spell the same
    input ("pod-1" + "11", "pod-11" + "1"), and a heavier replica keeps the points that it had.
    """
    digest = blake3(b"ring\0" + replica_id.encode("utf-8", "surrogatepass")).digest(length=count * _POINT_BYTES)
    return struct.unpack(f"<{count}Q", digest)


class Ring:
    """Replica ids on a circle of 2**64 positions.

    A point's lowest 16 bits give way to the owner's slot, so that the ring is one sorted list of integers: 1,024
    replicas are built in tens of milliseconds. Where two replicas meet on the other 48 bits (once in 20,000 fleets
    of that size), the slots decide, which other routers may have dealt differently.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, vnodes: int = VNODES) -> None:
        self._vnodes = vnodes
        self._counts: dict[str, int] = {}
        self._slots: dict[str, int] = {}
        self._ids: list[str] = []
        self._free: list[int] = []
        # Machine words, a fifth of the memory of as many objects: what a look-up in a large ring takes is cache misses.
        self._points = array("Q")
        if weights:
            self.update(weights)

    def __len__(self) -> int:
        return len(self._counts)

    def update(self, weights: Mapping[str, float]) -> None:
        """Make the ring hold exactly these replicas. Hashes only those that changed.

        weights: 1.0 gives `vnodes` points; at least one point each. Raises ValueError above 65,536 replicas, and
        then has changed nothing.
        """
        if len(weights) > _SLOT_MASK + 1:
            raise ValueError(f"a ring holds at most {_SLOT_MASK + 1} replicas")
        counts = {replica_id: max(1, round(self._vnodes * weight)) for replica_id, weight in weights.items()}
        changed = dict(counts.items() ^ self._counts.items()).keys()
        leaving = {self._slots.pop(replica_id) for replica_id in changed & self._counts.keys()}
        places = self._points.tolist()
        if leaving:
            places = [point for point in places if point & _SLOT_MASK not in leaving]
            self._free.extend(leaving)
        for replica_id in changed & counts.keys():
            slot = self._slots[replica_id] = self._take_slot(replica_id)
            places.extend([point & _PLACE_MASK | slot for point in points(replica_id, counts[replica_id])])
        places.sort()  # timsort: a long sorted run and a short unsorted tail
        self._points = array("Q", places)
        self._counts = counts

    def _take_slot(self, replica_id: str) -> int:
        if self._free:
            slot = self._free.pop()
            self._ids[slot] = replica_id
        else:
            slot = len(self._ids)
            self._ids.append(replica_id)
        return slot

    def walk(self, key: bytes) -> Iterator[str]:
        """Distinct replicas clockwise from the key: its order of preference."""
        ring, ids = self._points, self._ids
        left = len(self._counts)
        seen: set[int] = set()
        start = bisect_left(ring, position(key) & _PLACE_MASK)
        for index in range(start - len(ring), start):  # negative indices wrap around
            slot = ring[index] & _SLOT_MASK
            if slot not in seen:
                seen.add(slot)
                yield ids[slot]
                left -= 1
                if not left:
                    return

    def first(self, key: bytes, count: int) -> list[str]:
        """The first `count` of the order of preference, fewer where there are fewer replicas."""
        ring, ids = self._points, self._ids
        left = min(count, len(self._counts))
        index = bisect_left(ring, position(key) & _PLACE_MASK) - len(ring)
        chosen: list[str] = []
        while left > 0:
            replica_id = ids[ring[index] & _SLOT_MASK]
            index += 1
            if replica_id not in chosen:
                chosen.append(replica_id)
                left -= 1
        return chosen
