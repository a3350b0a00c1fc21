"""One request of a workload, and its visit to a replica in one run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.features import Features
    from serve_app.engine.cache import Blocks


@dataclass(slots=True, eq=False)
class Turn:
    """A request, the same for every policy.

    at_s: when it is sent; of a turn that follows another one: how long after that one's end (`then`).
    blocks: chained hashes of the whole blocks of the prompt and, where known, of the answer and what will follow it.
    number: 0 for a conversation's first turn.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    features: Features
    number: int = 0
    then: Turn | None = None


@dataclass(slots=True, eq=False)
class Visit:
    """What became of a turn. Times are virtual seconds, NaN until they have come.

    replica: index in the fleet. expected_tokens: what its replica will have to compute, as known on arrival.
    computed, cached_tokens: of the prompt, at its first prefill. left_tokens: still to be prefilled.
    output_tokens: generated so far.
    """

    turn: Turn
    sent_s: float
    replica: int = -1
    first_token_s: float = math.nan
    finished_s: float = math.nan
    cached_tokens: int = 0
    expected_tokens: int = 0
    left_tokens: int = 0
    output_tokens: int = 0
    finish_step: int = field(default=-1, repr=False)
    room_tokens: int = field(default=0, repr=False)
    blocks: Blocks | None = field(default=None, repr=False)

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.sent_s

    @property
    def context_tokens(self) -> int:
        """Prompt and answer so far."""
        return self.turn.prompt_tokens + self.output_tokens
