"""Features: everything about a request that routing depends on.

    headers, body -> Api, model            api, document
                  -> the prompt's stream   prompt, mask
                  -> its signatures        ladder
                  -> the session           session

All of it is a pure function of the request and the settings, so every instance of the router sees the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from extproc.core.api import Api, api_of
from extproc.core.document import Document, read_document
from extproc.core.ladder import FIRST_RUNG_BYTES, Rung, climb, scope_key, signature
from extproc.core.mask import Mask
from extproc.core.prompt import Prompt, canonical_prompt
from extproc.core.session import canonical_headers, find_session, header_name, scalar_text, tenant_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.core.request import Request
    from extproc.core.session import Session

__all__ = ["Api", "FeatureSettings", "Features", "Rung", "extract"]

# A prompt without turns (completions, embeddings) grows anywhere, so its key is taken near its beginning:
# about 1,000 tokens, beyond which a growing prompt keeps its key.
TURNLESS_KEY_LIMIT_BYTES: Final = 4096
PLAIN_OPENING_BYTES: Final = TURNLESS_KEY_LIMIT_BYTES  # the simulator's name for it

OPENING_LIMIT_BYTES: Final = 1 << 20

# What is not seen of a cut body counts as prompt up to here: about 256k tokens, as much as most models read.
_UNSEEN_LIMIT_BYTES = 1 << 20


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
        (see `known_sessions`). Below it reading costs little beside the rest (docs/performance.md). 0: all are read.
    known_sessions: how many of them are kept in mind, about 3 KB each.

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
    unread_from_bytes: int = 64 * 1024
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


@dataclass(slots=True)
class Features:
    """What is known of a request before any replica is looked at.

    conversation_key: 16 bytes; the session where the client names one, else the prompt's opening; None: no affinity.
    conversation_source: "header:<name>", "body:<path>", "prompt", or None.
    rungs: ascending by offset, the doubling ones and the semantic boundaries alike.
    system_rung: the boundary at the end of tools + system, None where there is none.
    prompt_bytes: length of the canonical prompt; of a truncated one an estimate from the content length.
    truncated: only the body's head was seen, or nothing of it.
    by_headers: the body was not asked for; all that it would say is an earlier turn's (extproc.core.known).
    streamed: the client asked for a stream, so the answer's beginning tells when the prefill is over.
    """

    api: Api
    model: str | None
    conversation_key: bytes | None
    conversation_source: str | None
    rungs: tuple[Rung, ...]
    system_rung: Rung | None
    prompt_bytes: int
    truncated: bool
    streamed: bool = True
    path: str = ""
    by_headers: bool = False


def extract(request: Request, settings: FeatureSettings) -> Features:
    """The features of a request, or of as much of it as was seen. Pure, and never raises.

    A call that carries no prompt, or whose body is no JSON object, has no affinity beyond its session.
    """
    try:
        return _extract(request, read_document(request.body, request.truncated), settings)
    except RecursionError:  # nested deeper than Python's reader or writer of JSON can follow
        return _extract(request, None, settings)


def _extract(request: Request, document: Document | None, settings: FeatureSettings) -> Features:
    fields = document.settled() if document is not None else {}
    truncated = request.truncated or (document is not None and document.open)
    api = api_of(request.method, request.path, fields)
    model = scalar_text(fields.get("model"))
    streamed = fields.get("stream") is True
    if api is Api.OTHER:
        # Nothing is known of its body, but a session that a header names is one.
        fields = {}
        if request.method.upper() != "POST":
            return Features(api, model, None, None, (), None, 0, truncated, streamed, request.path)
    headers = canonical_headers(request.headers)
    tenant = tenant_of(headers, settings)
    prompt = canonical_prompt(api, document, settings.template_fields, settings.masking) if document else None
    rungs: tuple[Rung, ...] = ()
    system_rung = opening = None
    prompt_bytes = 0
    if document is not None and prompt is not None:
        scope = _prefix_scope(fields, model, tenant, settings)
        rungs, system_rung, opening = _climb(prompt, scope, truncated, settings.opening_limit_bytes)
        prompt_bytes = _prompt_bytes(prompt, request, document, truncated)

    session = find_session(headers, fields, settings)
    key = source = None
    if session is not None:
        key, source = session_key(session, tenant, settings), session.source
    elif opening is not None:
        key, source = opening.signature, "prompt"
    return Features(api, model, key, source, rungs, system_rung, prompt_bytes, truncated, streamed, request.path)


def session_key(session: Session, tenant: bytes, settings: FeatureSettings) -> bytes:
    """The key of a conversation that its client names: 16 bytes, within its tenant."""
    return signature(scope_key(settings.secret, b"session", tenant), session.id)


def _prefix_scope(fields: Mapping[str, object], model: str | None, tenant: bytes, settings: FeatureSettings) -> bytes:
    """Prompts outside one scope share no cache: another model or adapter, another `cache_salt`."""
    named = (model or "", scalar_text(fields.get("cache_salt")) or "")
    parts = [part.encode("utf-8", "surrogatepass") for part in named]
    return scope_key(settings.secret, b"prefix", *parts, tenant if settings.prefix_by_tenant else b"")


def _climb(
    prompt: Prompt, scope: bytes, truncated: bool, opening_limit_bytes: int
) -> tuple[tuple[Rung, ...], Rung | None, Rung | None]:
    """(all rungs, the system's, the opening's)."""
    system_end, opening_end = prompt.system_end, prompt.opening_end
    if opening_end is not None and opening_end > opening_limit_bytes:
        opening_end = None
    boundaries = [end for end in (system_end, opening_end) if end is not None]
    if not boundaries and not truncated and len(prompt.stream) < FIRST_RUNG_BYTES:
        boundaries = [len(prompt.stream)]
    rungs = climb(prompt.stream, boundaries, scope)
    by_offset = {rung.offset_bytes: rung for rung in rungs}
    opening = by_offset.get(opening_end) if opening_end is not None else None
    if opening is None and rungs:
        limit = opening_limit_bytes if prompt.dialogue else TURNLESS_KEY_LIMIT_BYTES
        opening = next((rung for rung in reversed(rungs) if rung.offset_bytes <= limit), rungs[0])
    return rungs, by_offset.get(system_end) if system_end is not None else None, opening


def _prompt_bytes(prompt: Prompt, request: Request, document: Document, truncated: bool) -> int:
    """What was not seen of a body, or not read, is taken for prompt too, up to a limit: it may be a picture."""
    unseen_bytes = (request.content_length_bytes or 0) - len(request.body) if truncated else 0
    return len(prompt.stream) + min(max(0, unseen_bytes) + document.unread_bytes, _UNSEEN_LIMIT_BYTES)
