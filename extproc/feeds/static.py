"""Members written into the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from extproc.address import split_address
from extproc.core.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class StaticReplica:
    """One entry of a list of replicas.

    endpoint: "host:port". id: seeds the ring, so that an address may change and the replica's place stay; by default
    the endpoint. models: what it serves; empty: asked of the replica, or any. weight: relative speed.
    """

    endpoint: str
    id: str = ""
    weight: float = 1.0
    models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        split_address(self.endpoint)
        if not 0 < self.weight < float("inf"):
            raise ValueError("weight must be above 0")

    def replica(self) -> Replica:
        return Replica(self.id or self.endpoint, self.endpoint, frozenset(self.models), self.weight)


def replicas_of(entries: Iterable[StaticReplica]) -> tuple[Replica, ...]:
    """The replicas of a list. Raises ValueError where two have the same id or endpoint."""
    replicas = tuple(entry.replica() for entry in entries)
    for what, values in (("id", [r.id for r in replicas]), ("endpoint", [r.endpoint for r in replicas])):
        if twice := {value for value in values if values.count(value) > 1}:
            raise ValueError(f"two replicas have the same {what}: {', '.join(sorted(twice))}")
    return replicas


class StaticFeed:
    """Always the same list."""

    def __init__(self, entries: Iterable[StaticReplica]) -> None:
        self._replicas = replicas_of(entries)

    async def read(self) -> Sequence[Replica]:
        return self._replicas

    async def close(self) -> None:
        pass
