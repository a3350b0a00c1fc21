"""How long things take in the simulated engine.

Calibrated to one replica of a 400-billion-parameter model on eight H100s: a 4,096-token prompt takes 350 to
500 ms on a miss and about 12 ms when all of its whole blocks hit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MISS_TOKENS, MISS_S = 4096, 0.400
HIT_TOKENS, HIT_S = 16, 0.012  # a full hit still computes its last block


@dataclass(frozen=True, slots=True)
class Timing:
    """Time to first token = queue + uncached tokens / `prefill_tokens_per_s` + `overhead_s`.

    The default line runs through both points above. Only the middle term occupies the engine: overhead
    (tokenising, scheduling, one step, sampling) passes for all requests at once.

    decode_s_per_token: one step of memory-bound decoding; reading 405 GB of FP8 weights at 8 x 3.35 TB/s
        takes 15 ms, and attention, all-reduce and launch overheads make it about 25.
    """

    prefill_tokens_per_s: float = (MISS_TOKENS - HIT_TOKENS) / (MISS_S - HIT_S)
    overhead_s: float = HIT_S - HIT_TOKENS * (MISS_S - HIT_S) / (MISS_TOKENS - HIT_TOKENS)
    decode_s_per_token: float = 0.025

    def prefill_s(self, uncached_tokens: int) -> float:
        return uncached_tokens / self.prefill_tokens_per_s

    def scaled(self, time_scale: float) -> Timing:
        """The same engine with every duration multiplied by `time_scale` (0.1: ten times as fast)."""
        return replace(
            self,
            prefill_tokens_per_s=self.prefill_tokens_per_s / time_scale,
            overhead_s=self.overhead_s * time_scale,
            decode_s_per_token=self.decode_s_per_token * time_scale,
        )
