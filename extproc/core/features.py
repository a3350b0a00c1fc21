"""Features: everything about a request that routing depends on."""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

import jiter
from blake3 import blake3

from extproc.core.api import Api, api_of
from extproc.core.ladder import FIRST_RUNG_BYTES, SIGNATURE_BYTES, Rung, ladder
from extproc.core.prompt import Prompt, render
from extproc.core.session import SESSION_FIELDS, SESSION_HEADERS, canonical_header, canonical_headers, find_session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from extproc.core.request import Request

__all__ = ["Api", "FeatureSettings", "Features", "Rung", "extract"]

OPENING_LIMIT_BYTES: Final = 256 * 1024
"""The opening of a conversation is cut here, so that a head suffices to recognise it. Beyond the 60 to 100 KB of tools
and system prompt with which coding agents begin: were it within them, all their conversations would be one.
"""
PLAIN_OPENING_BYTES: Final = 4096
"""Where a prompt without turns is taken to begin to be a conversation of its own: the deepest rung up to here."""
LENIENT_JSON_BYTES: Final = 1024 * 1024
"""Documents up to this size that the strict parser refuses (lone surrogates, say) get a second try."""
CACHED_SCOPE_CHARS: Final = 256
"""Scopes beyond this are hashed anew each time: a client must not be able to fill the memory with model names."""

VOLATILE: Final = {
    "date": r"\b\d{4}-\d{2}-\d{2}\b|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b",
    "time": r"\b\d{1,2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?:\s?[AaPp][Mm]\b|Z|[+-]\d{2}:?\d{2})?",
    "uuid": r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b",
}
"""Spans that can be masked by name; any other name is taken as a regular expression of its own."""

_LONE_SURROGATE: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


@dataclass(frozen=True, slots=True)
class FeatureSettings:
    """What is read of a request.

    session_headers, session_fields: sources of the session id in their order, the headers first; header names in
        any case and with `_` or `-`, fields as dotted paths.
    tenant_headers: the first present scopes session ids, so that two tenants' equal ids never meet. Credentials are
        among them and, like all others, only ever hashed.
    prefix_by_tenant: scope prefixes by tenant too. Off: engines share their cache between tenants (a request that
        must not be shared says so by `cache_salt`, which is part of the scope).
    schema_in_prompt: the engine's template renders response_format and the like.
    mask: volatile spans that the key ignores: "date", "time", "uuid", or regular expressions.
    secret: keys every hash, so that nobody outside can aim conversations at one replica.
    """

    session_headers: tuple[str, ...] = SESSION_HEADERS
    session_fields: tuple[str, ...] = SESSION_FIELDS
    tenant_headers: tuple[str, ...] = ("x-tenant-id", "authorization", "x-api-key")
    prefix_by_tenant: bool = False
    schema_in_prompt: bool = False
    mask: tuple[str, ...] = ()
    secret: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "session_headers", tuple(map(canonical_header, self.session_headers)))
        object.__setattr__(self, "tenant_headers", tuple(map(canonical_header, self.tenant_headers)))
        for span in self.mask:
            try:
                re.compile(VOLATILE.get(span, span))
            except re.error as error:
                raise ValueError(f"mask: {span!r} is no name of a span and no regular expression: {error}") from None


@dataclass(slots=True)
class Features:
    """What is known of a request before any replica is looked at.

    conversation_key: 16 bytes; the session where the client names one, else the prompt's opening; None: no affinity.
    conversation_source: "header:<name>", "body:<path>", "prompt", or None.
    rungs: ascending by offset, the doubling ones and the semantic boundaries alike.
    system_rung: the boundary at the end of tools + system, None where there is none.
    prompt_bytes: length of the canonical prompt; of a truncated one an estimate from the content length.
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


def extract(request: Request, settings: FeatureSettings) -> Features:
    """The features of a request. Never raises: what can't be understood has no affinity, or that of its session."""
    api = api_of(request.path)
    headers = canonical_headers(request.headers)
    body = _parse(request.body, request.truncated) if request.body and api is not Api.OTHER else None
    open_key = next(reversed(body), None) if body and request.truncated else None
    tenant = _tenant(headers, settings.tenant_headers)

    prompt, model, salt = None, None, ""
    if body is not None:
        model = _text(body, "model", open_key)
        salt = _text(body, "cache_salt", open_key) or ""
        prompt = _render(api, body, request.truncated, settings)

    rungs: tuple[Rung, ...] = ()
    system_rung = opening = None
    if prompt is not None:
        prefix_tenant = tenant if settings.prefix_by_tenant else ""
        key = _scope("prefix", settings.secret, model or "", salt, prefix_tenant)
        opening_end = prompt.opening_end
        if prompt.has_turns and len(prompt.stream) >= OPENING_LIMIT_BYTES:
            # A cut stream may not reach the turn's end, nor needs to.
            opening_end = min(opening_end or OPENING_LIMIT_BYTES, OPENING_LIMIT_BYTES)
        ends = [end for end in (prompt.system_end, opening_end) if end is not None]
        # A cut prompt that shows less than the first rung shows nothing that it would not share with any other.
        if ends or len(prompt.stream) >= FIRST_RUNG_BYTES or not request.truncated:
            rungs = ladder(prompt.stream, key, ends)
            by_offset = {rung.offset_bytes: rung for rung in rungs}
            system_rung = by_offset.get(prompt.system_end or 0)
            opening = by_offset.get(opening_end or 0) or _plain_opening(rungs)

    session = find_session(headers, body, settings.session_headers, settings.session_fields, open_key)
    conversation_key = conversation_source = None
    if session is not None:
        session_id, conversation_source = session
        key = _scope("session", settings.secret, tenant)
        conversation_key = blake3(session_id.encode("utf-8", "surrogatepass"), key=key).digest(length=SIGNATURE_BYTES)
    elif opening is not None:
        conversation_key, conversation_source = opening.signature, "prompt"

    prompt_bytes = len(prompt.stream) if prompt is not None else 0
    if request.truncated and prompt is not None and request.content_length_bytes is not None:
        # The rest of a long body is nearly all prompt.
        prompt_bytes += max(0, request.content_length_bytes - len(request.body))
    streamed = body is not None and body.get("stream") is True
    return Features(
        api,
        model,
        conversation_key,
        conversation_source,
        rungs,
        system_rung,
        prompt_bytes,
        request.truncated,
        streamed,
    )


def _parse(body: bytes, truncated: bool) -> dict[str, Any] | None:
    """The document, or of a truncated one what there is of it. None where it is no JSON object."""
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        document = _parse_head(body) if truncated else _parse_whole(body)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _parse_whole(body: bytes) -> Any:
    try:
        return jiter.from_json(body)
    except ValueError:
        if len(body) > LENIENT_JSON_BYTES:
            raise
        return json.loads(body)


def _parse_head(body: bytes) -> Any:
    # Of two equal keys the later one counts but keeps the earlier one's place: the open one would not be the last.
    parse = partial(jiter.from_json, partial_mode="trailing-strings", catch_duplicate_keys=True)
    try:
        return parse(body)
    except ValueError:
        # JavaScript spells a text that was cut within an emoji so. What stands before it can be read.
        return parse(_LONE_SURROGATE.split(body, maxsplit=1)[0])


def _render(api: Api, body: dict[str, Any], truncated: bool, settings: FeatureSettings) -> Prompt | None:
    mask = _masker(settings.mask) if settings.mask else None
    try:
        return render(api, body, cut=truncated, mask=mask, schemas=settings.schema_in_prompt)
    except (ValueError, TypeError, RecursionError):  # nested or numbered beyond what can be spelled again
        return None


def _plain_opening(rungs: tuple[Rung, ...]) -> Rung:
    """The opening of a prompt without turns, or whose first turn is cut off."""
    return next((rung for rung in reversed(rungs) if rung.offset_bytes <= PLAIN_OPENING_BYTES), rungs[0])


def _text(body: dict[str, Any], name: str, open_key: str | None) -> str | None:
    value = body.get(name)
    return value if isinstance(value, str) and name != open_key else None


def _tenant(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    """A digest of the first header that is there, so that no credential is kept; "" without."""
    value = next((value for name in names if (value := headers.get(name))), None)
    return blake3(value.encode("utf-8", "surrogatepass")).hexdigest() if value else ""


def _scope(*fields: str) -> bytes:
    """A 32-byte key from fields, none of which can pass for another."""
    return _cached_scope(*fields) if sum(map(len, fields)) <= CACHED_SCOPE_CHARS else _cached_scope.__wrapped__(*fields)


@lru_cache(maxsize=4096)
def _cached_scope(*fields: str) -> bytes:
    hasher = blake3()
    for field in fields:
        data = field.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.digest()


@lru_cache(maxsize=8)
def _masker(spans: tuple[str, ...]) -> Callable[[str], str]:
    pattern = re.compile("|".join(f"(?:{VOLATILE.get(span, span)})" for span in spans))
    return lambda text: pattern.sub("\x1a", text)
