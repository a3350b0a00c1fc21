"""What a prompt looks like from outside: signatures of growing prefixes for the router, block hashes for an engine.

A prompt is a chain of pieces (a system prompt, a question, an answer, or the blocks of a trace), each a label and a
length in tokens. Two prompts agree exactly as far as their pieces do. Text is never made: the router's rungs are
derived from the chain where `extproc.core.ladder` would hash the bytes, at the same offsets.
"""

from __future__ import annotations

from typing import Final

from blake3 import blake3

from extproc.core.api import Api
from extproc.core.features import PLAIN_OPENING_BYTES, Features
from extproc.core.ladder import FIRST_RUNG_BYTES, SIGNATURE_BYTES, Rung
from extproc.core.settings import OPENING_LIMIT_BYTES

BYTES_PER_TOKEN: Final = 4
"""English text under the vocabularies of current models."""


class Transcript:
    """A prompt that grows.

    tokens: its length. blocks: chained hashes of its whole blocks of `block_tokens` tokens.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.tokens = 0
        self.blocks: list[int] = []
        self._tip = 0
        self._rungs: list[Rung] = []
        self._next_rung_bytes = FIRST_RUNG_BYTES
        self._system: Rung | None = None
        self._opening: Rung | None = None

    def append(self, label: int, tokens: int) -> None:
        """Add a piece. label: stands for its content; equal labels in equal places are equal text."""
        self._tip = hash((self._tip, label))  # of integers only, hence the same in every process
        size = self.block_tokens
        end = self.tokens + tokens
        for block_end in range((self.tokens // size + 1) * size, end + 1, size):
            self.blocks.append(hash((self._tip, block_end)))
        self.tokens = end
        while self._next_rung_bytes <= end * BYTES_PER_TOKEN:
            self._rungs.append(self._rung(self._next_rung_bytes))
            self._next_rung_bytes *= 2

    def end_system(self) -> None:
        """Tools and system prompt end here."""
        self._system = self._rung(self.tokens * BYTES_PER_TOKEN)

    def end_opening(self) -> None:
        """The first user turn ends here."""
        self._opening = self._rung(min(self.tokens * BYTES_PER_TOKEN, OPENING_LIMIT_BYTES))

    def features(self, session: int | None = None) -> Features:
        """What `extproc.core.features.extract` would find. session: the client's own id, None where it gives none."""
        rungs = {rung.offset_bytes: rung for rung in self._rungs}
        rungs.update({rung.offset_bytes: rung for rung in (self._system, self._opening) if rung})
        if not rungs:
            end = self._rung(self.tokens * BYTES_PER_TOKEN)
            rungs[end.offset_bytes] = end
        ladder = tuple(rungs[offset] for offset in sorted(rungs))
        if session is not None:
            key, source = blake3(b"session %d" % session).digest(length=SIGNATURE_BYTES), "header:x-session-id"
        else:
            below = [rung for rung in ladder if rung.offset_bytes <= PLAIN_OPENING_BYTES]
            key, source = (self._opening or (below or ladder)[-1 if below else 0]).signature, "prompt"
        return Features(
            api=Api.CHAT if self._opening else Api.COMPLETIONS,
            model=None,
            conversation_key=key,
            conversation_source=source,
            rungs=ladder,
            system_rung=self._system,
            prompt_bytes=self.tokens * BYTES_PER_TOKEN,
            truncated=False,
        )

    def _rung(self, offset_bytes: int) -> Rung:
        signature = blake3(b"%d %d" % (self._tip, offset_bytes)).digest(length=SIGNATURE_BYTES)
        return Rung(offset_bytes, signature)
