"""Features: everything about a request that routing depends on.

    headers, body -> Api, model            api, document
                  -> the prompt's stream   prompt, mask
                  -> its signatures        ladder
                  -> the session           session

All of it is a pure function of the request and the settings, so every instance of the router sees the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from extproc.core.api import Api, api_of
from extproc.core.document import Document, read_document
from extproc.core.ladder import FIRST_RUNG_BYTES, Rung, climb, scope_key, signature
from extproc.core.prompt import Prompt, canonical_prompt
from extproc.core.session import canonical_headers, find_session, scalar_text, tenant_of
from extproc.core.settings import FeatureSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.core.request import Request
    from extproc.core.session import Session

__all__ = ["Api", "FeatureSettings", "Features", "Rung", "extract"]

# A prompt without turns (completions, embeddings) grows anywhere, so its key is taken near its beginning:
# about 1,000 tokens, beyond which a growing prompt keeps its key.
TURNLESS_KEY_LIMIT_BYTES: Final = 4096
PLAIN_OPENING_BYTES: Final = TURNLESS_KEY_LIMIT_BYTES  # the simulator's name for it

# What is not seen of a cut body counts as prompt up to here: about 256k tokens, as much as most models read.
_UNSEEN_LIMIT_BYTES = 1 << 20


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
