"""Ladder: what a prompt begins with, as a dozen signatures.

The prompt's stream is hashed once, and the running digest is read off at 512 B, 1 KiB, 2 KiB and so on, and at
the prompt's own boundaries. Two prompts that begin alike have equal rungs up to where they part, so a dozen
signatures stand for a prompt of any length. BLAKE3 is keyed by the scope: what shares no cache shares no rung.

Signatures place conversations on replicas, so a change of any of them reshuffles every fleet on upgrade.
`tests/core/test_ladder.py` pins them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Iterable

FIRST_RUNG_BYTES = 512
SIGNATURE_BYTES = 16

# Hard-coded and unique, as BLAKE3's key derivation asks for. Changing it reshuffles every fleet.
_DERIVATION_CONTEXT = "prefix-affinity-router 2025-11 request signatures v1"


class Rung(NamedTuple):
    """A prefix signature: the keyed BLAKE3 of the prompt's first `offset_bytes` bytes (16 bytes of it)."""

    offset_bytes: int
    signature: bytes


@lru_cache(maxsize=4096)  # there are few: of each model, tenant and salt that is in use
def scope_key(secret: str, *parts: bytes) -> bytes:
    """The 32-byte BLAKE3 key for all that has these parts in common; each part counts by its place and length."""
    framed = b"".join([len(part).to_bytes(8, "little") + part for part in parts])
    return blake3(framed, key=_deployment_key(secret)).digest()


def signature(key: bytes, data: bytes) -> bytes:
    """The 16-byte keyed BLAKE3 of the data."""
    return blake3(data, key=key).digest(SIGNATURE_BYTES)


def climb(stream: bytes, boundaries: Iterable[int], key: bytes) -> tuple[Rung, ...]:
    """Read off the rungs of a stream: the doubling offsets that it reaches, and the given boundaries in it.

    Ascending, one for each offset. What lies beyond the last of them is not hashed.
    """
    offsets = {boundary for boundary in boundaries if 0 < boundary <= len(stream)}
    offset = FIRST_RUNG_BYTES
    while offset <= len(stream):
        offsets.add(offset)
        offset *= 2
    hasher = blake3(key=key)
    update, digest = hasher.update, hasher.digest
    rungs, at, view = [], 0, memoryview(stream)
    for offset in sorted(offsets):
        update(view[at:offset])
        rungs.append(Rung(offset, digest(SIGNATURE_BYTES)))
        at = offset
    return tuple(rungs)


def next_offset(length_bytes: int) -> int:
    """How long a prompt of this length must become to have another of the doubling rungs."""
    offset = FIRST_RUNG_BYTES
    while offset <= length_bytes:
        offset *= 2
    return offset


@lru_cache(maxsize=16)
def _deployment_key(secret: str) -> bytes:
    return blake3(secret.encode("utf-8", "surrogatepass"), derive_key_context=_DERIVATION_CONTEXT).digest()
