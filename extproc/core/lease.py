"""A lease: a decision's claim on its replica, from the decision to the end of the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extproc.core.load import ReplicaLoad


class Lease:
    """Counts as one request in flight on `load` while open; its tokens stand in the ledger until the first token.

    prompt_bytes: length of the canonical prompt. prompt_tokens, uncached_tokens: estimates at the decision.
    streamed: its answer begins with its first token; any other begins when the last is there.
    """

    __slots__ = ("decided_s", "load", "open", "prompt_bytes", "prompt_tokens", "streamed", "uncached_tokens")

    def __init__(
        self,
        load: ReplicaLoad,
        decided_s: float,
        prompt_bytes: int,
        prompt_tokens: float,
        uncached_tokens: float,
        streamed: bool,
    ) -> None:
        self.load = load
        self.decided_s = decided_s
        self.prompt_bytes = prompt_bytes
        self.prompt_tokens = prompt_tokens
        self.uncached_tokens = uncached_tokens
        self.streamed = streamed
        self.open = True
