"""What an operator can set about decisions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from extproc.core.ring import VNODES


class PolicyName(StrEnum):
    """How the replica is chosen among the candidates; extproc.core.policy has one class for each."""

    EXPECTED_WORK = "expected_work"
    RING_SPILLOVER = "ring_spillover"
    BOUNDED_LOAD = "bounded_load"


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of the decision.

    saturation_in_flight: a replica with more requests than this in flight is left while another has fewer. Where
        work is weighed the line only guards against what weighing does not see. At 16 it tore conversations from their
        caches under loads that engines batch with ease (vLLM runs up to 256 at once); 64 was better or equal on
        every simulated workload (docs/results.md).
    spillover_in_flight: the same line for ring_spillover, where the article has it that this router grew from.
    shed: refuse with 429 when all are saturated, instead of taking the least loaded.
    retry_after_s: what a refused client is told.
    vnodes: points per replica on the ring, see extproc.core.ring.
    session_candidates: how many of a conversation's order of preference are weighed. Two give most of what
        choice can give (Mitzenmacher's power of two choices; DualMap, arXiv 2602.06502).
    home_candidates: how many members of a shared prefix's home group are weighed. Conversations begin at different
        members, so one is enough: two gained nothing on any of the simulated workloads.
    holder_candidates: how many replicas that are remembered to hold the prompt are weighed. 4 or 6 gained nothing over
        2 on any of the simulated workloads, and cost time.
    decode_tokens: what one request in flight costs those beside it, in prefill tokens. 256 spreads a hot
        prefix evenly. Against 64 the mean TTFT is 7 to 9% longer in bursts and past saturation, as much shorter for
        agents, and else the same (docs/results.md).
    reuse_weight: a token to be computed keeps others waiting as well, about as many as are queued at a replica; so
        it counts 1 + reuse_weight x (mean queue). Near nothing while the fleet keeps up; past that, when work saved
        is what capacity is made of, it makes affinity stronger (docs/results.md).
    tie_tokens: work that differs by less is a tie, and ties keep ring order, so that a conversation that was
        pushed aside goes home. 128 tokens are about the 12 ms of a full cache hit.
    prefill_tokens_per_s: a replica's speed until it is learned: 4,096 tokens in 400 ms.
    bytes_per_token: until it is learned: about 4 bytes of English text.
    kv_capacity_tokens: a replica's cache size until its engine says it.
    slow_start_s: a replica that joins a running fleet counts as slower than it is for so long: its idle look
        comes from an empty cache.
    lease_limit_s: a lease older than this is a leak and is released.
    load_stale_s: an engine's own figures older than this are ignored: ten polls of 500 ms.
    placement_entries, placement_bytes: bounds of the placement memory.
    bounded_load_factor: for bounded_load: the most that a replica may have over its fair share
        (arXiv 1608.01350; 1.25 is the common choice).
    """

    policy: PolicyName = PolicyName.EXPECTED_WORK
    saturation_in_flight: int = 64
    spillover_in_flight: int = 16
    shed: bool = False
    retry_after_s: float = 1.0
    vnodes: int = VNODES
    session_candidates: int = 2
    home_candidates: int = 1
    holder_candidates: int = 2
    decode_tokens: float = 256.0
    reuse_weight: float = 1.0
    tie_tokens: float = 128.0
    prefill_tokens_per_s: float = 10_240.0
    bytes_per_token: float = 4.0
    kv_capacity_tokens: int = 400_000
    slow_start_s: float = 10.0
    lease_limit_s: float = 3600.0
    load_stale_s: float = 5.0
    placement_entries: int = 200_000
    placement_bytes: int = 128 * 1024 * 1024
    bounded_load_factor: float = 1.25

    def __post_init__(self) -> None:
        positive = {
            "retry_after_s",
            "vnodes",
            "prefill_tokens_per_s",
            "bytes_per_token",
            "kv_capacity_tokens",
            "lease_limit_s",
            "load_stale_s",
            "placement_entries",
            "placement_bytes",
        }
        wrong = [
            f"{field.name} must be {'above' if field.name in positive else 'at least'} 0"
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), int | float)
            and not isinstance(value, bool)
            and not (value > 0 if field.name in positive else value >= 0)
        ]
        if not self.bounded_load_factor > 1:
            wrong.append("bounded_load_factor must be above 1")
        if wrong:
            raise ValueError("; ".join(wrong))
