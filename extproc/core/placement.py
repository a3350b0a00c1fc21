"""Placement memory: where a signature was sent, and how long the prompt was that went there.

A bounded LRU. It improves on the ring, it does not replace it: after a restart, or in another router, the ring
alone still names the same home.

Whether a replica still holds what it was sent is judged by how much it has computed since: an engine's cache is an
LRU of its own, and what was last touched more than one cache size ago is gone.

Replicas that left need no forgetting: serials are never used twice, so theirs name nobody, and go as all else does.
Looking for them would hold up every request for 0.1 s at 200,000 signatures.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from extproc.core.ladder import Rung

HOLDERS: Final = 64
"""Replicas remembered per signature. A prefix that is on more of them is everywhere anyway."""

ENTRY_BYTES: Final = 360
HOLDING_BYTES: Final = 170
"""What an entry and each of its holdings take in CPython 3.11: within a tenth for 1 to 16 holdings, measured by
`python -m bench.memory`."""


Holding = tuple[int, float]
"""One replica's part of a signature: (length_bytes, stamp_tokens).

length_bytes: how much of the prompt it was sent: the rung's offset, or a conversation's whole length.
stamp_tokens: the replica's `computed_tokens` when it was last touched.
A plain tuple, since a decision makes a dozen of them.
"""

Level = tuple[int, int, dict[int, Holding]]
"""What is known of one rung: (its offset_bytes, that of the next rung, its holders). Above the last: ENDLESS_BYTES."""

ENDLESS_BYTES: Final = 1 << 62
"""Longer than any prompt, and an integer, as the other offsets are."""

NOBODY: Final[dict[int, Holding]] = {}


class PlacementMemory:
    """Signature -> replica serial -> Holding; the least recently used signatures go first."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self._holders: OrderedDict[bytes, dict[int, Holding]] = OrderedDict()
        self._holdings = 0

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def size_bytes(self) -> int:
        """What the memory is reckoned to occupy."""
        return len(self._holders) * ENTRY_BYTES + self._holdings * HOLDING_BYTES

    def holders(self, signature: bytes) -> dict[int, Holding]:
        """Replica serial -> Holding, the most recently touched last. Serials of replicas that left may be in it."""
        return self._holders.get(signature, NOBODY)

    def known(self, rungs: Sequence[Rung]) -> list[Level]:
        """The rungs that anybody was sent, deepest first."""
        get = self._holders.get
        levels: list[Level] = []
        next_bytes = ENDLESS_BYTES
        for offset_bytes, signature in reversed(rungs):
            holders = get(signature)
            if holders:
                levels.append((offset_bytes, next_bytes, holders))
            next_bytes = offset_bytes
        return levels

    def remember(self, lengths: Iterable[tuple[int, bytes]], serial: int, stamp_tokens: float) -> None:
        """A prompt has gone to this replica. lengths: (length_bytes, signature) of each part of it; rungs are such."""
        of, touch = self._holders, self._holders.move_to_end
        for length_bytes, signature in lengths:
            holders = of.get(signature)
            if holders is None:
                of[signature] = {serial: (length_bytes, stamp_tokens)}
                self._holdings += 1
                continue
            touch(signature)
            if serial in holders:
                del holders[serial]  # for the most recently touched to stand last
            elif len(holders) < HOLDERS:
                self._holdings += 1
            else:
                del holders[next(iter(holders))]
            holders[serial] = (length_bytes, stamp_tokens)
        if len(of) > self.max_entries or self.size_bytes > self.max_bytes:
            self._shrink()

    def resize(self, max_entries: int, max_bytes: int) -> None:
        """Change the bounds; what no longer fits goes at once."""
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self._shrink()

    def _shrink(self) -> None:
        while len(self._holders) > self.max_entries or self.size_bytes > self.max_bytes:
            _, holders = self._holders.popitem(last=False)
            self._holdings -= len(holders)
