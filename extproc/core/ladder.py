"""The prefix ladder: keyed BLAKE3 of the prompt, read off at growing offsets.

One hasher runs over the stream once; reading it off does not end it. A prompt of n bytes has log2(n / 512) doubling
rungs, so state and cost grow with the logarithm of the prompt, and two prompts share exactly the rungs below the
place where they part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Iterable

FIRST_RUNG_BYTES: Final = 512
"""The article's fixed signature; about 128 tokens, a few of the engine's cache blocks (16 tokens each)."""
SIGNATURE_BYTES: Final = 16
"""128 bits: no two prefixes of any fleet will meet by chance."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A prefix signature: the keyed BLAKE3 of the prompt's first `offset_bytes` bytes (16 bytes of it)."""

    offset_bytes: int
    signature: bytes


def offsets(length_bytes: int, boundaries: Iterable[int]) -> list[int]:
    """Where the ladder is read off: 512, 1024, 2048 ... up to the length, and at the boundaries; ascending.

    A prompt with neither has one rung, at its end.
    """
    found = set(boundaries)
    offset = FIRST_RUNG_BYTES
    while offset <= length_bytes:
        found.add(offset)
        offset *= 2
    if not found and length_bytes:
        found.add(length_bytes)
    return sorted(found)


def ladder(stream: bytes, key: bytes, boundaries: Iterable[int]) -> tuple[Rung, ...]:
    """The rungs of a prompt, ascending. key: 32 bytes, the scope within which prompts are compared."""
    hasher = blake3(key=key)
    view, start = memoryview(stream), 0
    rungs = []
    for offset in offsets(len(stream), boundaries):
        hasher.update(view[start:offset])
        start = offset
        rungs.append(Rung(offset, hasher.digest(length=SIGNATURE_BYTES)))
    return tuple(rungs)
