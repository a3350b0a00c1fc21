"""The KV cache of one replica, as vLLM manages it: blocks, found by the hash of everything before them.

A block holds BLOCK_TOKENS tokens; its hash covers its own tokens and, by chaining, all tokens before it, so a
prompt hits exactly the leading whole blocks that some earlier request left behind. Blocks in use by a running
request are held; released ones stay findable and are evicted least recently used first, the tail of a
prompt before its head, when another request needs room.

After vLLM's design document "Automatic Prefix Caching" (docs.vllm.ai, v1/core/block_pool.py). One difference:
two running requests that compute the same block end up sharing it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serve_app.engine.prompt import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_TOKENS = 16
"""vLLM's default block size on GPUs (its CPU backend uses 128)."""
_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES


def block_hashes(tokens: bytes, parent: int) -> list[int]:
    """Chained hash of each whole block of `tokens`, which follow the block `parent`.

    parent: for the first block of a prompt any number; different ones keep caches of different kinds apart.
    Valid within this process only: it is Python's own hash, which costs a fifth of a digest and is all that
    a cache in memory needs.
    """
    hashes: list[int] = []
    for start in range(0, len(tokens) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        parent = hash((parent, tokens[start : start + _BLOCK_BYTES]))
        hashes.append(parent)
    return hashes


@dataclass(slots=True)
class Blocks:
    """The blocks that one request holds.

    found: how many were in the cache. fresh: how many are still to be filled. hashes: of all the others.
    """

    found: int
    fresh: int
    hashes: list[int]


class PrefixCache:
    """Invariant: held + idle + fresh blocks never exceed `capacity_blocks`."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._held: dict[int, int] = {}  # hash -> running requests that use the block
        self._idle: OrderedDict[int, None] = OrderedDict()  # hash, least recently used first
        self._fresh = 0  # blocks of running requests that nobody can find yet

    @property
    def held_blocks(self) -> int:
        """Blocks that running requests use; vLLM's kv_cache_usage_perc is this over the capacity."""
        return len(self._held) + self._fresh

    def matched(self, hashes: Sequence[int]) -> int:
        """How many leading blocks of a prompt are cached."""
        for count, block in enumerate(hashes):
            if block not in self._held and block not in self._idle:
                return count
        return len(hashes)

    def acquire(self, hashes: Sequence[int], blocks: int) -> Blocks | None:
        """Take `blocks` blocks, of which the leading ones whose hash is cached come for free.

        hashes: of the leading whole blocks that may be reused, at most `blocks`.
        None: running requests hold too much; try again when one has released its blocks.
        """
        found = list(hashes[: self.matched(hashes)])
        revived = [block for block in found if block in self._idle]
        fresh = blocks - len(found)
        if self.held_blocks + len(revived) + fresh > self.capacity_blocks:
            return None
        for block in revived:
            del self._idle[block]
        for block in found:
            self._held[block] = self._held.get(block, 0) + 1
        self._fresh += fresh
        while self.held_blocks + len(self._idle) > self.capacity_blocks:
            self._idle.popitem(last=False)
        return Blocks(len(found), fresh, found)

    def publish(self, blocks: Blocks, hashes: Sequence[int]) -> None:
        """The request has filled its blocks up to `hashes`; from now on others find them."""
        for block in hashes[len(blocks.hashes) :]:
            self._idle.pop(block, None)
            self._held[block] = self._held.get(block, 0) + 1
            blocks.hashes.append(block)
            blocks.fresh -= 1
            self._fresh -= 1

    def release(self, blocks: Blocks) -> None:
        """The request has ended: what it published stays findable, the rest is free."""
        self._fresh -= blocks.fresh
        for block in reversed(blocks.hashes):
            users = self._held.pop(block) - 1
            if users:
                self._held[block] = users
            else:
                self._idle[block] = None
