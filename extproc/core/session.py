"""The session: the client's own name for a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SESSION_HEADERS: Final = ("x-session-id", "session-id", "x-conversation-id", "conversation-id")
"""Ray Serve's and vLLM's routers read x-session-id; the others are what clients are seen to send."""
SESSION_FIELDS: Final = (
    "session_id",
    "prompt_cache_key",  # OpenAI: requests with one key share a prefix and should land together
    "conversation",  # OpenAI responses: an id or {"id": ...}
    "conversation_id",
    "metadata.session_id",
    "previous_response_id",
)
"""`user` is not among them: one user may hold many conversations. `previous_response_id` names a turn rather than a
conversation; it comes last, and helps only a client that branches from one response again and again."""


def canonical_header(name: str) -> str:
    """One spelling for `X_Session_ID` and `x-session-id`: proxies rewrite the one to the other."""
    return name.strip().lower().replace("_", "-")


def find_session(
    headers: Mapping[str, str],
    body: Mapping[str, Any] | None,
    session_headers: Sequence[str],
    session_fields: Sequence[str],
    open_key: str | None = None,
) -> tuple[str, str] | None:
    """(id, source) of the first source that has a value, None if none has.

    headers: lower-case names. session_headers: canonical names. session_fields: dotted paths into the body.
    open_key: the body's field that is unfinished because the body is cut off; it is not looked at.
    source: "header:<name>" or "body:<path>".
    """
    value: str | None
    if any("_" in name for name in headers):
        headers = {canonical_header(name): text for name, text in headers.items()}
    for name in session_headers:
        if (text := headers.get(name)) is not None and (value := text.strip()):
            return value, f"header:{name}"
    if body:
        for path in session_fields:
            if (value := _field(body, path, open_key)) is not None:
                return value, f"body:{path}"
    return None


def _field(body: Mapping[str, Any], path: str, open_key: str | None) -> str | None:
    value: Any = body.get(path)
    if value is None and "." in path:
        value = body
        for step in path.split("."):
            value = value.get(step) if isinstance(value, dict) else None
    if value is None or path.partition(".")[0] == open_key:
        return None
    if isinstance(value, dict):
        value = value.get("id")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        try:
            return str(value).strip() or None
        except ValueError:  # an integer of thousands of digits
            return hex(int(value))
    return None
