"""What an operator can set: about what is read of a request, and about decisions."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Final

from extproc.core.mask import Mask
from extproc.core.ring import VNODES
from extproc.core.session import header_name

OPENING_LIMIT_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class FeatureSettings:
    """What of a request names its conversation, its tenant and its prompt.

    session_headers: looked up first, in this order, those made for routing in front; spelled with `-`, and `_` in a
        request is the same.
    session_fields: body fields looked up next, dotted. `user` and Anthropic's `metadata.user_id` are not among
        them: they name a person, whose many conversations would all go to one replica. `previous_response_id`
        is the last resort: it changes each turn, but a retry of one turn stays where it was. llm-d's x-session-token
        is left out as well: it names a pod.
    tenant_header: names the tenant; equal session ids of two tenants are two sessions. "": not used.
    credential_headers: stand for the tenant where that header is absent (hashed, never kept). Clients whose
        tokens rotate should send a tenant header, or this should be empty.
    prefix_by_tenant: also keep tenants' prompts apart. Off, since engines share their cache among all requests
        with the same `cache_salt`, which keeps them apart in any case.
    secret: keys every hash, so that no one outside can aim at a replica. The same in all routers of a fleet.
    template_fields: body fields that the model's chat template renders ahead of tools and system. The default is
        what vLLM hands to every template; add `response_format` or `reasoning_effort` for a template that
        renders them.
    mask: volatile spans to leave out of the key, any of "date", "time", "uuid" (see `mask.SPANS`).
    mask_patterns: further ones, as regular expressions of at most 128 characters' reach.
    opening_limit_bytes: a prompt's opening (up to its first user turn's end) counts only up to here. Where the
        router sees only the head of bodies it must be well below that head, so that whole and cut bodies agree;
        where it sees them whole, the default takes any opening that a model of 256k tokens can read.
    unread_from_bytes: of the conversations that a header names, bodies of this length and more are mostly left unread
        (see extproc.core.known). Below 2,000 tokens there is hardly anything to save; of 64 KB it saves a quarter of
        Envoy's and the router's CPU (docs/performance.md). 0: all are read.
    known_sessions: how many of them are kept in mind, about 2 KB each.

    Raises ValueError, saying all that is wrong, for settings that can't be used.
    """

    session_headers: tuple[str, ...] = (
        "x-session-id",  # Ray Serve (RAY_SERVE_SESSION_ID_HEADER_KEY), OpenRouter, opencode
        "x-smg-routing-key",  # SGLang's and SMG's policies `manual` and `consistent_hashing`
        "x-dynamo-session-id",  # NVIDIA Dynamo
        "x-session-affinity",  # Cloudflare Workers AI, Fireworks, opencode
        "x-claude-code-session-id",  # Claude Code ("Gateway protocol reference" in its docs)
        "x-litellm-session-id",  # LiteLLM
        "x-openwebui-chat-id",  # Open WebUI with ENABLE_FORWARD_USER_INFO_HEADERS
        "x-opencode-session",  # opencode's own providers
        "thread-id",  # Codex CLI: each agent of a session has a thread, and so a context, of its own
        "session-id",  # Codex CLI (`session_id` in its older versions)
        "x-conversation-id",  # LibreChat's examples with {{LIBRECHAT_BODY_CONVERSATIONID}}
        "conversation-id",  # Codex CLI's older versions, as `conversation_id`
        "x-prompt-cache-key",
    )
    session_fields: tuple[str, ...] = (
        "session_id",  # OpenRouter
        "litellm_session_id",  # LiteLLM
        "prompt_cache_key",  # OpenAI
        "conversation",  # OpenAI's Responses API: an id, or an object with one
        "conversation_id",
        "routing_key",  # SGLang
        "metadata.session_id",  # LiteLLM
        "metadata.conversation_id",
        "previous_response_id",
    )
    tenant_header: str = "x-tenant-id"
    credential_headers: tuple[str, ...] = ("authorization", "x-api-key", "api-key")
    prefix_by_tenant: bool = False
    secret: str = ""
    template_fields: tuple[str, ...] = ("documents", "chat_template", "chat_template_kwargs")
    mask: tuple[str, ...] = ()
    mask_patterns: tuple[str, ...] = ()
    opening_limit_bytes: int = OPENING_LIMIT_BYTES
    unread_from_bytes: int = 8 * 1024
    known_sessions: int = 10_000
    masking: Mask = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("session_headers", "credential_headers"):
            object.__setattr__(self, name, tuple(header_name(one) for one in getattr(self, name)))
        object.__setattr__(self, "tenant_header", header_name(self.tenant_header))
        object.__setattr__(self, "masking", Mask(self.mask, self.mask_patterns))
        if self.opening_limit_bytes <= 0:
            raise ValueError(f"opening_limit_bytes: {self.opening_limit_bytes} is not above 0")
        if self.unread_from_bytes < 0 or self.known_sessions < 0:
            raise ValueError("unread_from_bytes and known_sessions must be at least 0")

    @property
    def headers(self) -> tuple[str, ...]:
        """All headers that these settings name, spelled with `-`."""
        tenant = (self.tenant_header,) if self.tenant_header else ()
        return (*self.session_headers, *tenant, *self.credential_headers)


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
            f"{each.name} must be {'above' if each.name in positive else 'at least'} 0"
            for each in fields(self)
            if isinstance(value := getattr(self, each.name), int | float)
            and not isinstance(value, bool)
            and not (value > 0 if each.name in positive else value >= 0)
        ]
        if not self.bounded_load_factor > 1:
            wrong.append("bounded_load_factor must be above 1")
        if wrong:
            raise ValueError("; ".join(wrong))
