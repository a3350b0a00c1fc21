"""Session: the conversation that a client names, and the tenant within which the name counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.core.settings import FeatureSettings


class Session(NamedTuple):
    """A client's own name for its conversation. source: "header:<name>" or "body:<path>"."""

    id: bytes
    source: str


def header_name(name: str) -> str:
    """One spelling for `X_Session_ID` and `x-session-id`, since proxies rewrite the one to the other."""
    return name.strip().lower().replace("_", "-")


def canonical_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """The headers by `header_name`; of two spellings of one header that which says something."""
    if not any("_" in name for name in headers):
        return headers
    canonical: dict[str, str] = {}
    for name, value in headers.items():
        key = header_name(name)
        if value.strip() or key not in canonical:
            canonical[key] = value
    return canonical


def find_session(headers: Mapping[str, str], fields: Mapping[str, object], settings: FeatureSettings) -> Session | None:
    """The first of the configured headers, then body fields, that holds an id.

    headers: with canonical names. An id is any scalar: 7, "7" and a header `7` are one id. Empty, blank and null mean
    absent. An object stands for its "id" (the Responses API names a conversation either way).
    """
    for name in settings.session_headers:
        if name in headers and (session_id := _id(headers[name])):
            return Session(session_id, f"header:{name}")
    for path in settings.session_fields:
        # Most are not there, and are passed over without looking closer.
        if path in fields or (path.partition(".")[0] in fields and "." in path):
            session_id = _id(_field(fields, path))
            if session_id:
                return Session(session_id, f"body:{path}")
    return None


def tenant_of(headers: Mapping[str, str], settings: FeatureSettings) -> bytes:
    """Whose request this is: the tenant header, else the credentials. Empty: nobody in particular.

    It is only ever hashed. A tenant's name and an equal credential are two tenants.
    """
    if settings.tenant_header:
        name = settings.tenant_header
        tenant = _id(headers.get(name))
        if tenant:
            return b"tenant\x00" + tenant
    for name in settings.credential_headers:
        credential = _id(headers.get(name))
        if credential:
            return b"credential\x00" + credential
    return b""


def scalar_text(value: object) -> str | None:
    """A JSON scalar as the text that stands for it; None for null, arrays and objects."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        try:
            return str(value)
        except ValueError:  # an integer of more digits than Python is willing to write
            return hex(int(value))
    return None


def _id(value: object) -> bytes:
    text = scalar_text(value)
    return text.strip().encode("utf-8", "surrogatepass") if text else b""


def _field(fields: Mapping[str, object], path: str) -> object:
    value: object = fields
    for name in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value.get("id") if isinstance(value, dict) else value
