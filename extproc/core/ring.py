"""A weighted consistent-hash ring with virtual nodes.

Both levels of routing use it: level 1 asks for a shared prefix (its home group), level 2 for a conversation (its
order of preference). A replica's points come from its id alone, so any two routers with the same membership agree,
in whatever order they learned of it, and a join or a leave moves only the keys that it must.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VNODES: Final = 160
"""Points per replica of weight 1. A share's relative deviation is 1/sqrt(points) = 8%, and the busiest of 64
replicas is about 2.4 deviations above the mean: max/mean near 1.19 (tests/core/test_ring.py counts it)."""

_POINT_BYTES: Final = 8


def position(key: bytes) -> int:
    """Where a key lies: its first 8 bytes. Keys are BLAKE3 signatures, hence uniform already."""
    return int.from_bytes(key[:_POINT_BYTES], "little")


def points(replica_id: str, count: int) -> tuple[int, ...]:
    """The positions of a replica's virtual nodes.

    One BLAKE3 output of `count` x 8 bytes rather than a hash per "name + index": no two nodes can spell the same
    input ("pod-1" + "11", "pod-11" + "1"), and a heavier replica keeps the points that it had.
    """
    digest = blake3(b"ring\0" + replica_id.encode("utf-8", "surrogatepass")).digest(length=count * _POINT_BYTES)
    return struct.unpack(f"<{count}Q", digest)


class Ring:
    """Replica ids on a circle of 2**64 positions."""

    def __init__(self, weights: Mapping[str, float] | None = None, vnodes: int = VNODES) -> None:
        self._vnodes = vnodes
        self._counts: dict[str, int] = {}
        self._positions: list[int] = []
        self._owners: dict[int, str] = {}
        if weights:
            self.update(weights)

    def __len__(self) -> int:
        return len(self._counts)

    def update(self, weights: Mapping[str, float]) -> None:
        """Make the ring hold exactly these replicas. Touches only the points of those that changed.

        weights: 1.0 gives `vnodes` points; at least one point each.
        """
        counts = {replica_id: max(1, round(self._vnodes * weight)) for replica_id, weight in weights.items()}
        changed = {
            replica_id
            for replica_id in counts.keys() | self._counts.keys()
            if counts.get(replica_id) != self._counts.get(replica_id)
        }
        if not changed:
            return
        leaving = changed & self._counts.keys()
        if leaving:
            owners = self._owners
            self._positions = [point for point in self._positions if owners[point] not in leaving]
            self._owners = {point: owners[point] for point in self._positions}
        for replica_id in sorted(changed & counts.keys()):
            for point in points(replica_id, counts[replica_id]):
                # Two replicas on one of 2**64 points: the lower id owns it, whichever came first.
                if point not in self._owners:
                    self._positions.append(point)
                    self._owners[point] = replica_id
                elif replica_id < self._owners[point]:
                    self._owners[point] = replica_id
        self._positions.sort()  # timsort: a long sorted run and a short unsorted tail
        self._counts = counts

    def walk(self, key: bytes) -> Iterator[str]:
        """Distinct replicas clockwise from the key: its order of preference."""
        positions, owners = self._positions, self._owners
        total = len(self._counts)
        seen: set[str] = set()
        start = bisect_left(positions, position(key))
        for index in range(start - len(positions), start):  # negative indices wrap around
            owner = owners[positions[index]]
            if owner not in seen:
                seen.add(owner)
                yield owner
                if len(seen) == total:
                    return

    def first(self, key: bytes, count: int) -> list[str]:
        """The first `count` of the order of preference, fewer where there are fewer replicas."""
        found: list[str] = []
        if count <= 0:
            return found
        for replica_id in self.walk(key):
            found.append(replica_id)
            if len(found) == count:
                break
        return found
