"""Members written into the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from extproc.core.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class StaticReplica:
    """One entry of a list of replicas.

    endpoint: "ip:port". id: seeds the ring, so that an address may change and the replica's place stay; by default
    the endpoint. models: what it serves; empty: asked of the replica, or any. weight: relative speed.
    """

    endpoint: str
    id: str = ""
    weight: float = 1.0
    models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        host, _, port = self.endpoint.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f'endpoint: expected "ip:port", got {self.endpoint!r}')
        if not self.weight > 0:
            raise ValueError("weight must be above 0")

    def replica(self) -> Replica:
        return Replica(self.id or self.endpoint, self.endpoint, frozenset(self.models), self.weight)


class StaticFeed:
    """Always the same list."""

    def __init__(self, replicas: Sequence[StaticReplica]) -> None:
        self._replicas = tuple(entry.replica() for entry in replicas)

    async def read(self) -> Sequence[Replica]:
        return self._replicas

    async def close(self) -> None:
        pass
